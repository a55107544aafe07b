"""`python -m trainer` is `incv`, so that any launcher can start it."""

import sys

_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main() -> int:
    """Run the command. A run listens for Ctrl-C itself, and resumes; before it begins, nothing is lost."""
    try:
        from trainer.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        print("incv: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
