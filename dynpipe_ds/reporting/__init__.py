"""What a run looked like, as text and pictures; pure functions of plain values.

Nothing is imported here, so that who wants a table does not load the plotting library.
"""
