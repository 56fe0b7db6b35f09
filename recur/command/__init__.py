"""The `recur` command: one module a subcommand, and what they share."""
