"""The subcommands of ``trial-ray``, one file each: ``add_parser(subparsers)`` and ``run(args) -> exit code``."""
