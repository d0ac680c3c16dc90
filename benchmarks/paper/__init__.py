"""The paper's tables and figures, measured by replay on the real engine or simulated, side by side with its numbers."""
