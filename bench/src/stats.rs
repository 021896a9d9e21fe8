//! Medians and percentiles.

use serde::Serialize;

/// The median of the values, or 0 if there are none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// The largest of the values, or 0 if there are none.
pub(crate) fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, f64::max)
}

/// The geometric mean of ratios, in which a half and a double cancel out, or 1 if there are none.
pub(crate) fn geometric_mean(ratios: impl IntoIterator<Item = f64>) -> f64 {
    let logarithms: Vec<f64> = ratios.into_iter().map(f64::ln).collect();
    (logarithms.iter().sum::<f64>() / logarithms.len().max(1) as f64).exp()
}

/// Latencies in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Latency {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

impl Latency {
    /// Computes the percentiles of latencies in nanoseconds.
    pub(crate) fn of(mut nanoseconds: Vec<u64>) -> Latency {
        if nanoseconds.is_empty() {
            return Latency::default();
        }
        nanoseconds.sort_unstable();
        let at = |share: f64| {
            let rank = (nanoseconds.len() as f64 * share).ceil() as usize;
            nanoseconds[rank.clamp(1, nanoseconds.len()) - 1] as f64 / 1000.0
        };
        Latency { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }

    /// The median of each percentile over several rounds.
    pub(crate) fn median(rounds: &[Latency]) -> Latency {
        let of = |field: fn(&Latency) -> f64| median(rounds.iter().map(field));
        Latency { p50: of(|l| l.p50), p99: of(|l| l.p99), p999: of(|l| l.p999), max: of(|l| l.max) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Latency, median};

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(median([]), 0.0);
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn percentiles_are_by_rank() {
        let latency = Latency::of((1..=1000).map(|us| us * 1000).collect());
        assert_eq!(latency, Latency { p50: 500.0, p99: 990.0, p999: 999.0, max: 1000.0 });
    }
}
