"""Cron expressions: grammar, limits, time zones, days of change (cases C16, C17, C19, C20), preview."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_lifecycle.errors import ScheduleInvalid
from celery_lifecycle.timing import from_millis, parse_cron, preview, to_millis
from celery_lifecycle.timing.fields import read_fields

UTC = timezone.utc


def utc(text: str) -> int:
    return to_millis(datetime.fromisoformat(text).replace(tzinfo=UTC))


def runs(expression: str, zone: str, start: str, n: int) -> list[str]:
    """The next n times after a UTC time, in UTC."""
    cron, at, found = parse_cron(expression, zone), utc(start), []
    for _ in range(n):
        following = cron.next_after(at)
        assert following is not None
        at = following
        found.append(from_millis(at).strftime("%m-%d %H:%M"))
    return found


# -- grammar ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", {7}),
        ("07", {7}),
        ("1,2,2,9", {1, 2, 9}),
        ("5-8", {5, 6, 7, 8}),
        ("5-5", {5}),
        ("5-5/2", {5}),
        ("*/20", {0, 20, 40}),
        ("*/60", {0}),
        ("50/5", {50, 55}),
        ("59/15", {59}),
        ("10-30/7", {10, 17, 24}),
        ("50-10/7", {50, 57, 4}),
        ("55-4", {55, 56, 57, 58, 59, 0, 1, 2, 3, 4}),
        ("59-0/5", {59}),
        ("*,7", set(range(60))),
    ],
)
def test_lists_ranges_and_steps(text, values):
    assert set(read_fields(f"{text} * * * *").minutes) == values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0", {0}),
        ("7", {0}),
        ("sun", {0}),
        ("MON-Fri", {1, 2, 3, 4, 5}),
        ("0-7", set(range(7))),
        ("1-7", set(range(7))),
        ("5-7", {5, 6, 0}),
        ("5-7/2", {5, 0}),
        ("7-2", {0, 1, 2}),
        ("7-7", {0}),
        ("6-1", {6, 0, 1}),
        ("6-1/2", {6, 1}),
        ("sat-sun", {6, 0}),
        ("*/3", {0, 3, 6}),
        ("1/2", {1, 3, 5}),
    ],
)
def test_sunday_is_0_and_7_and_weekdays_have_names(text, values):
    assert read_fields(f"0 0 * * {text}").weekdays == values


def test_months_have_names_and_wrap():
    assert read_fields("0 0 1 jan,DEC *").months == {1, 12}
    assert read_fields("0 0 1 11-2/2 *").months == {11, 1}
    assert read_fields("0 0 1 oct-mar *").months == {10, 11, 12, 1, 2, 3}


def test_the_last_day_and_the_last_and_n_th_weekday_of_the_month():
    assert runs("0 0 L * *", "UTC", "2026-01-31T12:00", 2) == ["02-28 00:00", "03-31 00:00"]
    assert runs("0 0 15,L * *", "UTC", "2026-02-01T00:00", 2) == ["02-15 00:00", "02-28 00:00"]
    assert runs("0 0 28-L 2 *", "UTC", "2028-02-01T00:00", 2) == ["02-28 00:00", "02-29 00:00"]
    assert runs("0 0 * * fri#2", "UTC", "2026-01-01T00:00", 2) == ["01-09 00:00", "02-13 00:00"]
    assert runs("0 0 * * 5#5", "UTC", "2026-01-01T00:00", 2) == ["01-30 00:00", "05-29 00:00"]
    assert runs("0 0 * * L5", "UTC", "2026-01-01T00:00", 2) == ["01-30 00:00", "02-27 00:00"]
    assert runs("0 0 * * 7L", "UTC", "2026-01-01T00:00", 1) == ["01-25 00:00"]
    assert runs("0 0 * * mon-tue#1", "UTC", "2026-01-01T00:00", 3) == [
        "01-05 00:00",
        "01-06 00:00",
        "02-02 00:00",
    ]
    assert runs("0 0 * * 1,5#2", "UTC", "2026-01-01T00:00", 3) == [
        "01-05 00:00",
        "01-09 00:00",
        "01-12 00:00",
    ]


def test_c19_a_day_matches_by_day_of_month_or_by_day_of_week():
    found = runs("30 4 1,15 * 5", "UTC", "2026-01-01T00:00", 5)
    assert found == ["01-01 04:30", "01-02 04:30", "01-09 04:30", "01-15 04:30", "01-16 04:30"]


def test_a_day_field_that_is_a_star_in_another_spelling_restricts_nothing():
    assert runs("0 0 */1 * 1", "UTC", "2026-01-01T00:00", 2) == ["01-05 00:00", "01-12 00:00"]
    assert runs("0 0 */2 * 1", "UTC", "2026-01-01T00:00", 3) == ["01-03 00:00", "01-05 00:00", "01-07 00:00"]


@pytest.mark.parametrize(
    ("expression", "field"),
    [
        ("0-99999999/1 * * * *", "minute"),
        ("*/0 * * * *", "minute"),
        ("*/61 * * * *", "minute"),
        ("*/99999 * * * *", "minute"),
        ("60 * * * *", "minute"),
        ("-1 * * * *", "minute"),
        ("1,,2 * * * *", "minute"),
        ("1- * * * *", "minute"),
        ("1.5 * * * *", "minute"),
        ("٣ * * * *", "minute"),
        ("h * * * *", "minute"),
        ("R * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* */25 * * *", "hour"),
        ("* 1-30 * * *", "hour"),
        ("* * 0 * *", "day of month"),
        ("* * 32 * *", "day of month"),
        ("* * ? * *", "day of month"),
        ("* * 15W * *", "day of month"),
        ("* * L-3 * *", "day of month"),
        ("* * mon * *", "day of month"),
        ("* * * 0 *", "month"),
        ("* * * 13 *", "month"),
        ("* * * january *", "month"),
        ("* * * * 8", "day of week"),
        ("* * * * L", "day of week"),
        ("* * * * 5#0", "day of week"),
        ("* * * * 5#6", "day of week"),
        ("* * * * #2", "day of week"),
        ("* * * * *#2", "day of week"),
        ("* * * * fri#L", "day of week"),
    ],
)
def test_c20_what_is_outside_the_grammar_is_refused_with_its_field_named(expression, field):
    with pytest.raises(ScheduleInvalid, match=f"The {field} field"):
        parse_cron(expression)


@pytest.mark.parametrize(
    ("expression", "field"),
    [
        (",".join(["0"] * 200_000) + " * * * *", "minute"),
        ("* * * * " + ",".join(["mon"] * 200), "day of week"),
        (" " * 1_000_000 + "* * * * *", "minute"),
    ],
)
def test_c20_a_long_list_is_refused_at_once_with_its_field_named(expression, field):
    began = time.perf_counter()
    with pytest.raises(ScheduleInvalid, match=f"{field} field"):
        parse_cron(expression)
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
    "expression",
    ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 30,31 feb *", "*/5 * 31 2-2 *"],
)
def test_what_can_never_match_is_refused(expression):
    with pytest.raises(ScheduleInvalid, match="can never match"):
        parse_cron(expression)


def test_what_matches_seldom_is_allowed():
    assert runs("0 0 29 2 *", "UTC", "2096-03-01T00:00", 1) == ["02-29 00:00"]
    assert runs("0 0 30 2 1", "UTC", "2026-01-01T00:00", 1) == ["02-02 00:00"]
    assert runs("0 0 * 2 1#5", "UTC", "2072-03-01T00:00", 1) == ["02-29 00:00"]


@pytest.mark.parametrize("count", [0, 1, 4, 6, 7])
def test_there_are_five_fields(count):
    with pytest.raises(ScheduleInvalid, match="must have five"):
        parse_cron(" ".join(["*"] * count))


@pytest.mark.parametrize(("alias", "instead"), [("@daily", "0 0 * * *"), ("@Hourly", "0 * * * *")])
def test_a_nickname_is_refused_with_what_to_write_instead(alias, instead):
    with pytest.raises(ScheduleInvalid) as error:
        parse_cron(alias)
    assert repr(instead) in str(error.value)


@pytest.mark.parametrize("expression", [None, 5, b"* * * * *", ["*"], datetime(2026, 1, 1)])
def test_an_expression_is_a_string(expression):
    with pytest.raises(ScheduleInvalid):
        parse_cron(expression)


@pytest.mark.parametrize(
    "zone",
    [
        "Nowhere/Land",
        "",
        "America",
        "../../etc/passwd",
        "/etc/localtime",
        "localtime",
        "Eu\0rope",
        "ü",
        None,
        5,
        [],
    ],
)
def test_an_unknown_zone_is_refused_by_name(zone):
    with pytest.raises(ScheduleInvalid) as error:
        parse_cron("* * * * *", zone)
    assert repr(zone) in str(error.value)


@settings(max_examples=400)
@given(st.one_of(st.text(), st.lists(st.sampled_from("0123459*/-,#Lljanmonfri "), max_size=20).map("".join)))
def test_any_text_is_an_expression_or_an_error_of_ours(text):
    for expression in (text, f"{text} * * * *", f"* * {text} * {text}"):
        try:
            cron = parse_cron(expression)
        except ScheduleInvalid:
            continue
        assert cron.next_after(0) is not None


# -- zones and days of change ------------------------------------------------------------------------


def test_c16_every_hour_of_a_day_with_25_hours():
    cron = parse_cron("0 * * * *", "US/Pacific")
    assert cron.count_between(utc("2026-11-01T07:00") - 1, utc("2026-11-02T08:00") - 1) == 25
    assert "11-01 09:00" in runs("0 * * * *", "US/Pacific", "2026-11-01T06:59", 25)


def test_c17_a_fixed_time_in_a_repeated_hour_runs_the_first_time_only():
    found = runs("30 1 * * *", "America/New_York", "2026-10-31T12:00", 2)
    assert found == ["11-01 05:30", "11-02 06:30"]


def test_a_fixed_time_in_a_gap_runs_right_after_it_once():
    assert runs("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", 2) == ["03-29 01:00", "03-30 00:30"]
    assert runs("*/10 2 * * *", "Europe/Berlin", "2026-03-28T12:00", 2) == ["03-29 01:00", "03-30 00:00"]
    assert runs("0 2,3 * * *", "Europe/Berlin", "2026-03-28T12:00", 2) == ["03-29 01:00", "03-30 00:00"]
    assert runs("15 1-3 * * *", "Europe/Berlin", "2026-03-28T12:00", 3) == [
        "03-29 00:15",
        "03-29 01:00",
        "03-29 01:15",
    ]


def test_a_rhythm_goes_by_elapsed_time():
    assert runs("30 * * * *", "Europe/Berlin", "2026-03-29T00:00", 2) == ["03-29 00:30", "03-29 01:30"]
    assert runs("0 */2 * * *", "Europe/Berlin", "2026-03-28T22:30", 2) == ["03-28 23:00", "03-29 02:00"]
    assert runs("0 */2 * * *", "Europe/Berlin", "2026-10-24T23:00", 3) == [
        "10-25 00:00",
        "10-25 01:00",
        "10-25 03:00",
    ]
    assert runs("0 1-23/2 * * *", "Europe/Berlin", "2026-10-24T22:30", 2) == ["10-24 23:00", "10-25 02:00"]


def test_a_range_of_hours_is_a_fixed_hour_even_if_it_holds_all():
    assert len(set(runs("30 0-23 * * *", "Europe/Berlin", "2026-10-24T22:00", 24))) == 24
    assert runs("30 0-23 * * *", "Europe/Berlin", "2026-10-25T00:00", 2) == ["10-25 00:30", "10-25 02:30"]


def test_a_time_just_after_a_repeated_hour_is_found_from_within_its_second_showing():
    assert runs("29 1 * * 0", "America/Havana", "2023-11-05T05:32", 1) == ["11-05 06:29"]


def test_shifts_of_half_an_hour():
    assert runs("0 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", 2) == ["10-03 15:30", "10-04 15:00"]
    assert runs("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", 2) == ["04-04 14:45", "04-05 15:15"]


def test_midnight_that_does_not_exist():
    assert runs("0 0 * * *", "America/Havana", "2026-03-07T12:00", 2) == ["03-08 05:00", "03-09 04:00"]


def test_a_day_that_was_left_out_of_the_calendar():
    found = runs("0 8 * * *", "Pacific/Apia", "2011-12-29T12:00", 4)
    assert found == ["12-29 18:00", "12-30 10:00", "12-30 18:00", "12-31 18:00"]
    assert runs("0 */12 * * *", "Pacific/Apia", "2011-12-29T12:00", 3) == [
        "12-29 22:00",
        "12-30 10:00",
        "12-30 22:00",
    ]
    assert parse_cron("0 8 * * *", "Pacific/Apia").count_between(utc("2011-12-29T12:00"), utc("2012-01-05T12:00")) == 8


def test_a_change_of_the_base_offset_is_a_change_like_any_other():
    # Pyongyang went half an hour back at midnight on 2015-08-15, and half an hour forward on 2018-05-04.
    assert runs("45 23 * * *", "Asia/Pyongyang", "2015-08-14T12:00", 2) == ["08-14 14:45", "08-15 15:15"]
    assert runs("45 23 * * *", "Asia/Pyongyang", "2018-05-04T12:00", 2) == ["05-04 15:00", "05-05 14:45"]


def test_next_is_strictly_after_and_prev_at_or_before():
    cron = parse_cron("0 8 * * *", "Europe/Berlin")
    eight = utc("2026-06-01T06:00")
    assert cron.next_after(eight - 1) == eight
    assert cron.next_after(eight) == eight + 86_400_000
    assert cron.prev_at_or_before(eight) == eight
    assert cron.prev_at_or_before(eight - 1) == eight - 86_400_000


def test_the_end_of_the_calendar_is_no_error():
    cron = parse_cron("0 0 1 1 *", "Pacific/Kiritimati")
    assert cron.next_after(utc("9999-12-31T23:00")) is None
    assert cron.prev_at_or_before(0) is not None
    assert cron.next_after(0) is not None


@pytest.mark.parametrize(
    ("expression", "zone"),
    [
        ("0 0 29 2 *", "UTC"),
        ("0 0 * 2 1#5", "Europe/Berlin"),
        ("* * * * *", "Antarctica/Casey"),
        ("59 23 31 12 *", "Pacific/Apia"),
        ("*/7 3 L * 5#5", "Australia/Lord_Howe"),
    ],
)
def test_the_next_time_is_computed_in_a_few_milliseconds(expression, zone):
    cron = parse_cron(expression, zone)
    began = time.perf_counter()
    for year in range(1970, 2070):
        cron.next_after(utc(f"{year}-03-01T00:00"))
    assert (time.perf_counter() - began) / 100 < 0.005


def rows_of_the_document() -> list[list[str]]:
    document = Path(__file__).parents[2] / "docs" / "schedules.md"
    rows = [line.strip("| \n").split(" | ") for line in document.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if len(row) == 9 and row[0].startswith("`")]


@pytest.mark.parametrize("row", rows_of_the_document(), ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_the_table_in_the_documentation_says_what_the_code_does(row):
    cron, at, until = parse_cron(row[0].strip("`"), row[1]), utc(row[2]), utc(row[3])
    found = []
    while (following := cron.next_after(at)) is not None and following <= until:
        at = following
        found.append(from_millis(at).strftime("%d %H:%M"))
    assert ", ".join(found) == row[4]


def test_the_documentation_has_its_table():
    assert len(rows_of_the_document()) >= 17


# -- preview ---------------------------------------------------------------------------------------


def test_a_preview_shows_utc_and_local_time_and_marks_the_day_of_change():
    rows = preview("0 8 * * *", "Europe/Berlin", utc("2026-10-24T00:00"), 3)
    assert [row.utc for row in rows] == [
        datetime(2026, 10, day, 8 - off, tzinfo=UTC) for day, off in ((24, 2), (25, 1), (26, 1))
    ]
    assert rows[0].local.isoformat() == "2026-10-24T08:00:00+02:00"
    assert rows[1].local.tzinfo == ZoneInfo("Europe/Berlin")
    assert [row.note for row in rows] == [None, "clocks go back 1:00 at 03:00", None]


@pytest.mark.parametrize(
    ("expression", "zone", "start", "notes"),
    [
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-03-29T00:00",
            ["clocks go forward 1:00 at 02:00: runs right after the gap"],
        ),
        (
            "30 2 * * *",
            "Europe/Berlin",
            "2026-10-25T00:00",
            ["clocks go back 1:00 at 03:00: first of the two 02:30"],
        ),
        (
            "30 */2 * * *",
            "Europe/Berlin",
            "2026-10-25T00:00",
            [
                "clocks go back 1:00 at 03:00: first of the two 02:30",
                "clocks go back 1:00 at 03:00: second of the two 02:30",
                "clocks go back 1:00 at 03:00",
            ],
        ),
        ("0 3 * * *", "Europe/Berlin", "2026-03-29T00:00", ["clocks go forward 1:00 at 02:00"]),
        (
            "0 0 * * *",
            "America/Havana",
            "2026-03-08T00:00",
            ["clocks go forward 1:00 at 00:00: runs right after the gap"],
        ),
        ("0 9 * * *", "Australia/Lord_Howe", "2026-10-03T20:00", ["clocks go forward 0:30 at 02:00", None]),
    ],
)
def test_the_note_says_what_the_clocks_do(expression, zone, start, notes):
    rows = preview(expression, zone, utc(start), len(notes))
    assert [row.note for row in rows] == notes


def test_a_preview_ends_where_the_times_end():
    assert preview("0 */24 * 3 sun#2", "America/Havana", utc("2026-01-01T00:00"), 3) == []
    assert preview("* * * * *", "UTC", 0, 0) == []


def test_local_times_are_those_of_the_zone_on_ordinary_days():
    for row in preview("15 8 * * mon", "America/St_Johns", utc("2026-01-01T00:00"), 60):
        assert (row.local.hour, row.local.minute, row.local.isoweekday()) == (8, 15, 1)
        assert row.local.utcoffset() in {timedelta(hours=-3, minutes=-30), timedelta(hours=-2, minutes=-30)}
