"""Workers that come and go while a pipeline trains: seconds of every batch and of every pause."""
