//! The goals of the case `disk`.

use super::Row;
use super::testbed::Contender;
use super::workload::{POLLED_READ_1, RANDOM_READ_1, RANDOM_READ_32};
use crate::report::goals::Goal;
use crate::stats::geometric_mean;

/// A ratio from here on counts as equal; a smaller difference is noise.
const EQUAL: f64 = 0.97;
/// The goal for workloads with flushes. A flush of Cairn may have to sync two files.
const FLUSH: f64 = 0.8;

pub(super) fn goals(rows: &[Row]) -> Vec<Goal> {
    let mut goals = Vec::new();
    for row in rows {
        let name = row.name();
        let [raw, qemu, cairn] =
            [Contender::Raw, Contender::Qemu, Contender::Cairn].map(|c| row.of(c).iops);
        let wanted = if row.spec.flushes() { FLUSH } else { EQUAL };
        goals.push(Goal::at_least(format!("{name}: of qemu"), cairn / qemu, wanted));
        if [RANDOM_READ_1, RANDOM_READ_32, POLLED_READ_1].contains(&row.workload) {
            // The smaller one of 1.25 times qemu-storage-daemon and 0.95 times the raw file.
            let wanted = f64::min(1.25, 0.95 * raw / qemu);
            goals.push(Goal::at_least(format!("{name}: ahead of qemu"), cairn / qemu, wanted));
        }
        if row.spec.len == 256 << 10 {
            goals.push(Goal::at_least(format!("{name}: of the raw file"), cairn / raw, 0.9));
        }
    }
    goals.push(cpu(rows));
    goals
}

/// The goal for CPU time: a request must not cost more than with qemu-storage-daemon, in any
/// workload.
fn cpu(rows: &[Row]) -> Goal {
    let ratio = |row: &Row| {
        row.of(Contender::CairnQuiet).cpu_us / row.of(Contender::QemuQuiet).cpu_us.max(0.01)
    };
    let worst = rows.iter().max_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let (worst, name) = worst.map_or((0.0, String::new()), |row| (ratio(row), row.name()));
    let above = rows.iter().filter(|row| ratio(row) > 1.0 / EQUAL).count();
    let mean = geometric_mean(rows.iter().map(ratio));
    let what = format!(
        "CPU time of a request, both without polling, of qemu: mean {mean:.2}, above it in {above} of {}, \
         worst in {name}",
        rows.len()
    );
    Goal::at_most(what, worst, 1.0 / EQUAL)
}
