//! The periods of retention: hours, days, ISO weeks, months and years, at a fixed offset from UTC.

use std::fmt;

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// The times that count, in seconds since 1970: up to the end of the year 9999. A later time counts
/// as this one.
const LAST_TIME: u64 = 253_402_300_799;

/// The length of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Unit {
    Hour,
    Day,
    Week,
    Month,
    Year,
}

/// One period, such as the second week of 2026. Its text names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Period {
    unit: Unit,
    /// Hours, days or weeks since those of 1970-01-01; months or years since the year 0.
    index: i64,
}

impl Period {
    /// The period that contains a time, in seconds since 1970, on a clock that is `offset` seconds
    /// ahead of UTC.
    pub(super) fn of(time: u64, offset: i64, unit: Unit) -> Period {
        let local = time.min(LAST_TIME).cast_signed() + offset;
        let day = local.div_euclid(DAY);
        let index = match unit {
            Unit::Hour => local.div_euclid(HOUR),
            Unit::Day => day,
            // 1970-01-01 was a Thursday, and a week starts on Monday.
            Unit::Week => (day + 3).div_euclid(7),
            Unit::Month => {
                let Date { year, month, .. } = Date::of(day);
                year * 12 + month - 1
            }
            Unit::Year => Date::of(day).year,
        };
        Period { unit, index }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let index = self.index;
        match self.unit {
            Unit::Hour => {
                let date = Date::of(index.div_euclid(24));
                write!(f, "{date} {:02}h", index.rem_euclid(24))
            }
            Unit::Day => write!(f, "{}", Date::of(index)),
            Unit::Week => {
                // The year of an ISO week is that of its Thursday.
                let thursday = index * 7;
                let year = Date::of(thursday).year;
                let week = (thursday - day_of(year, 1, 1)) / 7 + 1;
                write!(f, "{year:04}-W{week:02}")
            }
            Unit::Month => write!(f, "{:04}-{:02}", index.div_euclid(12), index.rem_euclid(12) + 1),
            Unit::Year => write!(f, "{index:04}"),
        }
    }
}

/// A day of the Gregorian calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Date {
    year: i64,
    month: i64,
    day: i64,
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl Date {
    /// The date of a number of days since 1970-01-01.
    fn of(days: i64) -> Date {
        // At most one year off: a year has at most 366 days.
        let mut year = 1970 + days.div_euclid(366);
        while day_of(year + 1, 1, 1) <= days {
            year += 1;
        }
        let mut month = 1;
        while month < 12 && day_of(year, month + 1, 1) <= days {
            month += 1;
        }
        Date { year, month, day: days - day_of(year, month, 1) + 1 }
    }
}

/// The number of days from 1970-01-01 to this date.
fn day_of(year: i64, month: i64, day: i64) -> i64 {
    const BEFORE_MONTH: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let leap_days = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let is_leap = leap_days(year) != leap_days(year - 1);
    let in_year = BEFORE_MONTH[(month - 1) as usize] + i64::from(is_leap && month > 2);
    (year - 1970) * 365 + leap_days(year - 1) - leap_days(1969) + in_year + day - 1
}

#[cfg(test)]
mod tests {
    use super::{Date, Period, Unit, day_of};

    /// Seconds from 1970 to a moment in UTC.
    fn at(year: i64, month: i64, day: i64, hour: i64) -> u64 {
        (day_of(year, month, day) * 86_400 + hour * 3600) as u64
    }

    fn name(time: u64, offset: i64, unit: Unit) -> String {
        Period::of(time, offset, unit).to_string()
    }

    #[test]
    fn every_day_of_four_centuries_has_the_date_after_that_of_the_day_before() {
        let mut expected = Date { year: 1970, month: 1, day: 1 };
        for day in 0..146_097 * 2 {
            assert_eq!(Date::of(day), expected, "day {day}");
            let Date { year, month, .. } = expected;
            let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 if is_leap => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            expected = match (expected.day == length, month) {
                (false, _) => Date { day: expected.day + 1, ..expected },
                (true, 12) => Date { year: year + 1, month: 1, day: 1 },
                (true, _) => Date { month: month + 1, day: 1, ..expected },
            };
        }
    }

    #[test]
    fn weeks_start_on_monday_and_belong_to_the_year_of_their_thursday() {
        for (date, week) in [
            ((1970, 1, 1), "1970-W01"),
            ((2024, 12, 29), "2024-W52"),
            ((2024, 12, 30), "2025-W01"),
            ((2026, 1, 1), "2026-W01"),
            ((2026, 12, 31), "2026-W53"),
            ((2027, 1, 3), "2026-W53"),
            ((2027, 1, 4), "2027-W01"),
            ((2000, 2, 29), "2000-W09"),
            ((2005, 1, 1), "2004-W53"),
        ] {
            let (year, month, day) = date;
            assert_eq!(name(at(year, month, day, 12), 0, Unit::Week), week, "{date:?}");
        }
    }

    #[test]
    fn a_leap_day_is_a_day_of_february_and_of_its_year() {
        let leap = at(2024, 2, 29, 23);
        assert_eq!(name(leap, 0, Unit::Hour), "2024-02-29 23h");
        assert_eq!(name(leap, 0, Unit::Day), "2024-02-29");
        assert_eq!(name(leap, 0, Unit::Month), "2024-02");
        assert_eq!(name(leap + 3600, 0, Unit::Month), "2024-03");
        assert_eq!(name(at(2100, 2, 28, 0) + 86_400, 0, Unit::Day), "2100-03-01");
    }

    #[test]
    fn periods_begin_at_the_midnight_of_the_offset() {
        let eve = at(2025, 12, 31, 23);
        for (offset, year, week, day) in [
            (0, "2025", "2026-W01", "2025-12-31"),
            (3600, "2026", "2026-W01", "2026-01-01"),
            (-12 * 3600, "2025", "2026-W01", "2025-12-31"),
            (5 * 3600 + 2700, "2026", "2026-W01", "2026-01-01"),
        ] {
            assert_eq!(name(eve, offset, Unit::Year), year);
            assert_eq!(name(eve, offset, Unit::Week), week);
            assert_eq!(name(eve, offset, Unit::Day), day);
        }
        // An offset that is not a whole number of hours moves the hours.
        assert_ne!(
            Period::of(at(2026, 1, 1, 1), 1800, Unit::Hour),
            Period::of(at(2026, 1, 1, 1) + 1800, 1800, Unit::Hour)
        );
    }

    #[test]
    fn times_at_the_edges_have_periods() {
        assert_eq!(name(0, -14 * 3600, Unit::Hour), "1969-12-31 10h");
        assert_eq!(name(0, -14 * 3600, Unit::Week), "1970-W01");
        assert_eq!(name(u64::MAX, 14 * 3600, Unit::Year), "10000");
    }
}
