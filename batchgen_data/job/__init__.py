"""The job: files in, completed files out, through Ray Data."""
