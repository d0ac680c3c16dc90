"""Finding the k largest weights over ranks."""
