//! Parsing and printing sizes.

const SUFFIXES: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// Parses a size such as `65536`, `512M` or `1T`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let unit = |last: char| SUFFIXES.iter().find(|(suffix, _)| suffix.eq_ignore_ascii_case(&last));
    let (digits, shift) = match text.chars().last().and_then(unit) {
        Some((_, shift)) => (&text[..text.len() - 1], *shift),
        None => (text, 0),
    };
    let valid = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let number = valid.then(|| digits.parse::<u64>().ok()).flatten();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| "expected a number of bytes, or a number with a suffix K, M, G or T".into())
}

/// Parses a percentage such as `5%` or `0.1%`. Returns it as a fraction.
pub(crate) fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || b".%".contains(&byte));
    let fraction = number.filter(|percent| is_plain && *percent > 0.0 && *percent <= 100.0);
    fraction
        .map(|percent| percent / 100.0)
        .ok_or_else(|| "expected more than 0% and at most 100%, such as 5%".into())
}

/// Formats a size with at most one decimal, such as `20 GiB`, `1.5 MiB` or `512 B`.
pub(crate) fn human_size(bytes: u64) -> String {
    for (suffix, shift) in SUFFIXES.iter().rev() {
        // 1023.95 of the smaller unit would be rounded to 1024, so the larger unit is used from
        // there.
        if bytes as f64 >= (1_u64 << shift) as f64 - (1_u64 << (shift - 10)) as f64 * 0.05 {
            let tenths = (bytes as f64 * 10.0 / (1_u64 << shift) as f64).round() as u64;
            return match tenths % 10 {
                0 => format!("{} {suffix}iB", tenths / 10),
                rest => format!("{}.{rest} {suffix}iB", tenths / 10),
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::{human_size, parse_percent, parse_size};

    #[test]
    fn a_percentage_has_its_sign() {
        for (text, fraction) in [("5%", 0.05), ("100%", 1.0), ("0.5%", 0.005)] {
            assert_eq!(parse_percent(text), Ok(fraction), "{text}");
        }
        for bad in ["", "5", "%", "0%", "100.1%", "-5%", "1e1%", "nan%", "inf%", "5%%"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_have_binary_suffixes() {
        for (text, size) in
            [("0", 0), ("65536", 65536), ("4k", 4096), ("10G", 10 << 30), ("1T", 1 << 40)]
        {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
        for bad in ["", "G", "1.5G", "-1", "+1", "1KB", "1 G", "99999999T", "1é"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_printed_with_at_most_one_decimal() {
        for (size, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1 MiB"),
            (20 << 30, "20 GiB"),
            ((20 << 30) + 1, "20 GiB"),
            (64 << 40, "64 TiB"),
        ] {
            assert_eq!(human_size(size), text);
        }
    }
}
