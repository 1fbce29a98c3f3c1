"""`python -m arroyo_dagster.cli.pipes`, where no script is wanted."""

from arroyo_dagster.cli.pipes import serve

if __name__ == "__main__":
    serve()
