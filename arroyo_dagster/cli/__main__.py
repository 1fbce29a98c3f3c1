"""`python -m arroyo_dagster.cli`, for installations without the script on the path."""

from arroyo_dagster.cli import main

if __name__ == "__main__":
    main()
