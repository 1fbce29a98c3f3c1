"""`python -m arroyo_dagster.cli`, where the script is not on the path."""

from arroyo_dagster.cli import main

if __name__ == "__main__":
    main()
