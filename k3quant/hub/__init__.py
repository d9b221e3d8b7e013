"""The Hub: a remote source of files, and a download that proves what it wrote."""
