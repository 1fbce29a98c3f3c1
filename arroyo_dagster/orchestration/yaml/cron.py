"""The form of cron expressions that Dagster accepts, as one regular expression for a schema."""

_MACROS = ("hourly", "daily", "midnight", "weekly", "monthly", "yearly", "annually")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_WITHOUT_31 = (2, 4, 6, 9, 11)


def _any_case(names: tuple[str, ...]) -> str:
    """Return what matches the names; a JSON schema has no flag for the case of letters."""
    return "|".join("".join(f"[{one}{one.upper()}]" for one in name) for name in names)


def _field(value: str) -> str:
    """Return what matches lists of values and ranges, each with a step or without."""
    item = rf"(\*|({value})(-({value}))?)(/0*[1-9][0-9]*)?"
    return rf"{item}(,{item})*"


def _month(number: int) -> str:
    return rf"(0*{number}|{_any_case((_MONTHS[number - 1],))})"


_MINUTE = _field("0*[0-5]?[0-9]")
_HOUR = _field("0*([01]?[0-9]|2[0-3])")
_DAY = rf"(\?|{_field('0*([1-9]|[12][0-9]|3[01])|[lL]')})"
_MONTH = _field(f"0*([1-9]|1[0-2])|{_any_case(_MONTHS)}")
_DAY_NAME = f"0*[0-7]|{_any_case(_DAYS)}"
_NTH = f"(({_DAY_NAME})#[1-5]|[lL][0-7])"
_WEEKDAY = rf"(\?|{_field(_DAY_NAME)}|{_NTH}(,{_NTH})*)"

_SHORT = f"({'|'.join(map(_month, _WITHOUT_31))})"
_NO_SUCH_DAY = (
    rf"(?!\S+\s+\S+\s+"  # days that none of the months has, on any day of the week
    rf"(0*3[01](,0*3[01])*\s+{_month(2)}|0*31(,0*31)*\s+{_SHORT}(,{_SHORT})*)\s+[*?]\s*$)"
    rf"(?!\S+\s+\S+\s+0*3[01]\s+{_month(2)}\s)"  # Dagster refuses it with a weekday, too
)

CRON = (
    rf"^(@({_any_case(_MACROS)})"
    rf"|\s*{_NO_SUCH_DAY}{_MINUTE}\s+{_HOUR}\s+{_DAY}\s+{_MONTH}\s+{_WEEKDAY}\s*)$"
)
"""Matches five fields of possible values, or a name such as `@daily`."""
