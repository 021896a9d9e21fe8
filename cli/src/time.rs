//! Formatting times in UTC, ages, and parsing intervals.

use std::time::Duration;

/// The units of intervals and ages, in seconds, the longest first.
const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];

/// An interval between actions. `None` means that the action never happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interval(pub(crate) Option<Duration>);

/// Parses an interval such as `14d`, `12h`, `90` (seconds) or `off`.
pub(crate) fn parse_interval(text: &str) -> Result<Interval, String> {
    if text == "off" {
        return Ok(Interval(None));
    }
    let unit = |last: char| UNITS.iter().find(|(suffix, _)| *suffix == last);
    let (number, seconds) = match text.chars().last().and_then(unit) {
        Some((_, seconds)) => (&text[..text.len() - 1], *seconds),
        None => (text, 1),
    };
    match number.parse::<f64>().map(|number| number * seconds as f64) {
        Ok(0.0) => Ok(Interval(None)),
        Ok(seconds) if seconds > 0.0 && seconds <= 1e9 => {
            Ok(Interval(Some(Duration::from_secs_f64(seconds))))
        }
        _ => {
            Err("expected a number of seconds, a number with a suffix s, m, h or d, or 'off'"
                .into())
        }
    }
}

/// Parses a period such as `24h`, or 0.
pub(crate) fn parse_period(text: &str) -> Result<Duration, String> {
    match text {
        // Off could mean no period, or no end of it.
        "off" => Err("expected a period such as 24h, or 0 for none".into()),
        _ => parse_interval(text).map(|period| period.0.unwrap_or_default()),
    }
}

/// Parses an age such as `7d`, in seconds: a number with a suffix s, m, h, d or w.
pub(crate) fn parse_age(text: &str) -> Result<u64, String> {
    const WEEK: (char, u64) = ('w', 7 * 86_400);
    /// Ages beyond this one are mistakes: about 300 years.
    const LIMIT: u64 = 10_000_000_000;
    let units = UNITS.iter().chain([&WEEK]);
    let parsed = units.filter_map(|(suffix, seconds)| {
        let number = text.strip_suffix(*suffix)?;
        let is_plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(*seconds)
    });
    let age = parsed.into_iter().next().filter(|age| (1..LIMIT).contains(age));
    age.ok_or_else(|| {
        "expected a number of 1 or more with a suffix s, m, h, d or w, such as 7d".into()
    })
}

/// Parses an offset from UTC such as `+05:30`, in minutes.
pub(crate) fn parse_utc_offset(text: &str) -> Result<i16, String> {
    let parse = || {
        let (sign, rest) = match text.strip_prefix('-') {
            Some(rest) => (-1, rest),
            None => (1, text.strip_prefix('+')?),
        };
        let (hours, minutes) = rest.split_once(':')?;
        let number = |part: &str| {
            let is_plain = part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse::<i16>().ok().filter(|_| is_plain)
        };
        let (hours, minutes) = (number(hours)?, number(minutes)?);
        (hours <= 14 && minutes < 60).then_some(sign * (hours * 60 + minutes))
    };
    parse().ok_or_else(|| "expected an offset from UTC such as +01:00 or -05:30".into())
}

/// Formats the time from `then` to `now`, both in seconds since 1970, such as `3 d ago`.
pub(crate) fn ago(then: u64, now: u64) -> String {
    // The clocks of two machines differ.
    let seconds = now.saturating_sub(then);
    let (suffix, unit) = UNITS.into_iter().find(|(_, unit)| seconds >= *unit).unwrap_or(('s', 1));
    let name = if suffix == 'm' { "min".to_owned() } else { suffix.to_string() };
    format!("{} {name} ago", seconds / unit)
}

/// Formats seconds since 1970, such as `2024-02-29 23:59:59Z`.
pub(crate) fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

/// The year, month and day of a number of days since 1970-01-01.
///
/// Years start in March, so that the leap day is their last day. They are counted in cycles of 400
/// years, which all have the same number of days.
fn date(days: u64) -> (u64, u64, u64) {
    const CYCLE: u64 = 146_097;
    /// Days from 0000-03-01 to 1970-01-01.
    const EPOCH: u64 = 719_468;
    let (cycle, day) = ((days + EPOCH) / CYCLE, (days + EPOCH) % CYCLE);
    let year = (day - day / 1460 + day / 36_524 - day / (CYCLE - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (cycle * 400 + year + carry, month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Interval, ago, parse_age, parse_interval, parse_utc_offset, utc};

    #[test]
    fn intervals_have_units_and_can_be_off() {
        let seconds = |seconds| Ok(Interval(Some(Duration::from_secs_f64(seconds))));
        for (text, wanted) in [
            ("14d", seconds(14.0 * 86_400.0)),
            ("12h", seconds(12.0 * 3600.0)),
            ("1.5m", seconds(90.0)),
            ("0.5s", seconds(0.5)),
            ("90", seconds(90.0)),
            ("0", Ok(Interval(None))),
            ("0d", Ok(Interval(None))),
            ("off", Ok(Interval(None))),
        ] {
            assert_eq!(parse_interval(text), wanted, "{text}");
        }
        for bad in ["", "d", "-1d", "1w", "never", "1e99", "nan", "inf", "1 d", "5é"] {
            assert!(parse_interval(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_age_needs_a_unit_and_an_offset_a_sign() {
        for (text, age) in [("1s", 1), ("90m", 5400), ("7d", 604_800), ("2w", 1_209_600)] {
            assert_eq!(parse_age(text), Ok(age), "{text}");
        }
        for bad in ["", "7", "d", "0d", "-1d", "+1d", "1.5d", "7 d", "7D", "99999999999w", "1y"] {
            assert!(parse_age(bad).is_err(), "{bad}");
        }
        for (text, minutes) in [("+00:00", 0), ("-00:30", -30), ("+14:00", 840), ("-05:30", -330)] {
            assert_eq!(parse_utc_offset(text), Ok(minutes), "{text}");
        }
        for bad in ["", "1", "+1", "01:00", "+1:00", "+15:00", "+01:60", "+01:-1", "Z", "+0a:00"] {
            assert!(parse_utc_offset(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ages_have_one_unit() {
        let day = 86_400;
        for (seconds, text) in [
            (0, "0 s ago"),
            (59, "59 s ago"),
            (60, "1 min ago"),
            (7199, "1 h ago"),
            (3 * day + 7, "3 d ago"),
            (400 * day, "400 d ago"),
        ] {
            assert_eq!(ago(1_800_000_000, 1_800_000_000 + seconds), text);
        }
        assert_eq!(ago(1_800_000_009, 1_800_000_000), "0 s ago");
    }

    #[test]
    fn times_are_printed_in_utc() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00Z"),
            (951_868_799, "2000-02-29 23:59:59Z"),
            (951_868_800, "2000-03-01 00:00:00Z"),
            (1_709_251_199, "2024-02-29 23:59:59Z"),
            (1_735_689_599, "2024-12-31 23:59:59Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
