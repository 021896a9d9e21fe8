//! Formatting times in UTC.

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
    use super::utc;

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
