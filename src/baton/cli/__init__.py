"""The `baton` command, one file for each subcommand."""
