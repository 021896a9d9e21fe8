//! The goals of the case `checkpoint`.

use super::strategy::Strategy;
use super::subject::Contender;
use super::{MIB, Rounds, Size};
use crate::report::goals::Goal;
use crate::stats::{largest, median};

/// A smaller difference between pauses counts as equal, in microseconds.
const PAUSE_NOISE_US: f64 = 200.0;

pub(super) fn goals(sizes: &[Size]) -> Vec<Goal> {
    // The goals are for 1 GiB. A quick run uses its largest size.
    let Some(size) = sizes.iter().rfind(|size| size.plan.dirty <= 1024 * MIB) else {
        return Vec::new();
    };
    let Some(cairn) = size.of(Contender::Cairn) else { return Vec::new() };
    let name = size.name();
    let mut goals = pauses(sizes, cairn, &name);
    goals.extend(guest(size, cairn, &name));
    goals.extend(slowdowns(size, cairn, &name));
    let plain = median(size.plain_s.iter().copied());
    let rate = plain / cairn.median(|o| o.idle_stable_s);
    goals.push(Goal::at_least(format!("{name}: rate of storing, of a plain writer"), rate, 0.6));
    goals
}

fn pauses(sizes: &[Size], cairn: &Rounds, name: &str) -> Vec<Goal> {
    let all = |rounds: &Rounds| -> Vec<f64> {
        rounds.rounds.iter().flat_map(|outcome| outcome.pauses_us.clone()).collect()
    };
    // There are some dozens of pauses, so the largest one is the 99th percentile.
    let worst = largest(all(cairn));
    let of_size = sizes.iter().filter_map(|size| size.of(Contender::Cairn));
    let medians: Vec<f64> =
        of_size.map(|r| r.median(|o| o.pauses_us.first().copied().unwrap_or(0.0))).collect();
    let spread =
        largest(medians.iter().copied()) - medians.iter().copied().reduce(f64::min).unwrap_or(0.0);
    vec![
        Goal::limit(format!("{name}: pause, p99"), worst, 1000.0, "us"),
        Goal::limit("pause: difference between the sizes", spread, PAUSE_NOISE_US, "us"),
    ]
}

fn guest(size: &Size, cairn: &Rounds, name: &str) -> Vec<Goal> {
    let silent = largest(cairn.rounds.iter().map(|o| o.timeline.silent as f64));
    let share = |value: fn(&super::timeline::Timeline) -> f64| {
        cairn.median(|o| value(&o.timeline) / o.timeline.iops_before)
    };
    let longer = cairn.median(|o| o.stable_s) / cairn.median(|o| o.idle_stable_s);
    let mut goals =
        vec![Goal::limit(format!("{name}: silent intervals"), silent, 0.0, "of 100 ms")];
    if let Some(qemu) = size.of(Contender::Qemu) {
        let worst = |rounds: &Rounds| rounds.median(|o| o.timeline.during.max);
        let ratio = worst(cairn) / worst(qemu);
        goals.push(Goal::at_most(format!("{name}: worst latency, of qemu's"), ratio, 0.05));
    }
    goals.extend([
        Goal::at_least(
            format!("{name}: iops until stable, of before"),
            share(|t| t.iops_during),
            0.7,
        ),
        Goal::at_least(format!("{name}: iops in the first 2 s"), share(|t| t.iops_first), 0.5),
        Goal::at_most(format!("{name}: time to stable, of an idle guest's"), longer, 3.0),
    ]);
    goals
}

fn slowdowns(size: &Size, cairn: &Rounds, name: &str) -> Vec<Goal> {
    let own = cairn.median(super::Outcome::slowdown);
    let others = [Strategy::Offline, Strategy::Precopy, Strategy::Cow].map(Contender::Paper);
    let others = others.into_iter().filter_map(|contender| size.of(contender));
    others
        .map(|other| {
            let theirs = other.median(super::Outcome::slowdown);
            Goal::at_most(format!("{name}: slowdown, than {}", other.name), own, theirs)
        })
        .collect()
}
