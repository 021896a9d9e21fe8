//! Retention: which snapshots of an image a policy keeps, and why. Pure functions.
//!
//! ```text
//! candidates ─► rules select ─► protections add ─► a verdict with its reason for each candidate
//! ```
//!
//! The rules select in this order: last, within, hourly, daily, weekly, monthly, yearly. A rule with
//! a number goes through the snapshots from the newest to the oldest, and skips those that an
//! earlier rule has decided about:
//!
//! - A snapshot in a period (an hour, a day, and so on) in which an earlier rule keeps a snapshot
//!   is skipped. So the periods that a rule counts are further ones.
//! - Otherwise, the first snapshot of its period is kept, and takes one of the rule's number. The
//!   other ones of the period are decided: later rules skip them.
//!
//! Rules look at snapshots with content only. Newest is what has the highest number, whatever its
//! time is: a host whose clock steps back, or was wrong for a while, takes no place away from later
//! snapshots.
//!
//! A verdict never removes: a snapshot that is being stored, a pinned one, one that the caller
//! protects (such as the parent of a mirror), and the last stable one. If no snapshot of the image
//! is stable, none with content is removed.

mod calendar;
mod policy;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fmt;

use self::calendar::{Period, Unit};
pub use self::policy::{RetentionPolicy, Rule};
use crate::snapshot::SnapshotState;

/// A snapshot, as far as retention depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its number.
    pub number: u64,
    /// When it was requested: seconds since 1970, UTC.
    pub time: u64,
    /// Its state.
    pub state: SnapshotState,
    /// Whether it is pinned.
    pub is_pinned: bool,
    /// Whether its guest does not need it any more.
    pub is_obsolete: bool,
    /// Why something else needs it, if so.
    pub protection: Option<String>,
}

/// What is done with a snapshot, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays.
    Keep(Kept),
    /// It goes.
    Remove(Removed),
}

impl Verdict {
    /// Whether the snapshot goes.
    pub fn is_removal(&self) -> bool {
        matches!(self, Verdict::Remove(_))
    }
}

/// Why a snapshot stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It is being stored.
    Pending,
    /// It is pinned.
    Pinned,
    /// No policy applies, or the policy keeps all snapshots.
    All,
    /// A rule selects it, as the one of this period if the rule has periods.
    Rule(Rule, Option<String>),
    /// Something else needs it.
    Protected(String),
    /// It is the last stable snapshot of the image.
    LastStable,
    /// No snapshot of the image is stable.
    NoStable,
    /// It has failed, and nothing newer was stored since.
    NewestFailure,
}

/// Why a snapshot goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// No rule selects it.
    NotSelected,
    /// Its guest does not need it any more, and no rule selects it.
    Obsolete,
    /// It has failed, and a newer snapshot was stored since.
    Failed,
    /// Its removal has begun.
    Begun,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kept::Pending => f.pad("it is being stored"),
            Kept::Pinned => f.pad("pinned"),
            Kept::All => f.pad("keep-all"),
            Kept::Rule(rule, None) => f.pad(rule.name()),
            Kept::Rule(rule, Some(period)) => f.pad(&format!("{rule} ({period})")),
            Kept::Protected(reason) => f.pad(reason),
            Kept::LastStable => f.pad("the last stable snapshot"),
            Kept::NoStable => f.pad("no snapshot of the image is stable"),
            Kept::NewestFailure => f.pad("no newer snapshot is stored"),
        }
    }
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Removed::NotSelected => "no rule keeps it",
            Removed::Obsolete => "its guest has marked it obsolete",
            Removed::Failed => "it has failed",
            Removed::Begun => "its removal has begun",
        })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Keep(why) => why.fmt(f),
            Verdict::Remove(why) => why.fmt(f),
        }
    }
}

/// The number of the last stable snapshot.
pub fn last_stable(candidates: &[Candidate]) -> Option<u64> {
    let stable = candidates.iter().filter(|one| one.state == SnapshotState::Stable);
    stable.map(|one| one.number).max()
}

/// Decides what happens to each snapshot of an image at the time `now`. The candidates are all
/// snapshots of the image in the order of their numbers, and the result is in the same order.
/// Without a policy, only what its guest does not need any more goes, and what is being removed.
pub fn retention(
    candidates: &[Candidate],
    policy: Option<&RetentionPolicy>,
    now: u64,
) -> Vec<Verdict> {
    debug_assert!(candidates.is_sorted_by_key(|one| one.number), "candidates are in order");
    let selected = match policy {
        Some(policy) if !policy.keeps_all() => select(candidates, policy, now),
        _ => vec![None; candidates.len()],
    };
    let image = ImageFacts {
        policy,
        last_stable: last_stable(candidates),
        last_content: candidates
            .iter()
            .rev()
            .find(|one| one.state.has_content())
            .map(|one| one.number),
    };
    candidates.iter().zip(selected).map(|(one, rule)| verdict(one, rule, &image)).collect()
}

/// What verdicts need to know about the whole image.
struct ImageFacts<'a> {
    policy: Option<&'a RetentionPolicy>,
    last_stable: Option<u64>,
    last_content: Option<u64>,
}

fn verdict(one: &Candidate, rule: Option<Kept>, image: &ImageFacts<'_>) -> Verdict {
    let kept = |why| Verdict::Keep(why);
    match one.state {
        SnapshotState::Pending => return kept(Kept::Pending),
        SnapshotState::Removing => return Verdict::Remove(Removed::Begun),
        SnapshotState::Available | SnapshotState::Stable | SnapshotState::Failed => {}
    }
    if one.is_pinned {
        return kept(Kept::Pinned);
    }
    // The host's policy wins over the wish of the guest, also if it keeps all snapshots.
    let wanted = match image.policy {
        Some(policy) if policy.keeps_all() => Some(Kept::All),
        Some(_) => rule,
        None => (!one.is_obsolete).then_some(Kept::All),
    };
    if let Some(why) = wanted.or_else(|| one.protection.clone().map(Kept::Protected)) {
        return kept(why);
    }
    if one.state == SnapshotState::Failed {
        return match image.last_content > Some(one.number) {
            true => Verdict::Remove(Removed::Failed),
            false => kept(Kept::NewestFailure),
        };
    }
    match image.last_stable {
        None => kept(Kept::NoStable),
        Some(last) if last == one.number => kept(Kept::LastStable),
        Some(_) if one.is_obsolete => Verdict::Remove(Removed::Obsolete),
        Some(_) => Verdict::Remove(Removed::NotSelected),
    }
}

/// What the rules have decided about a snapshot.
#[derive(Clone, Debug)]
enum Mark {
    Keep(Kept),
    /// A snapshot of the same period is kept instead.
    Skip,
}

/// The rules that select snapshots: for each candidate the first of them, if any.
fn select(candidates: &[Candidate], policy: &RetentionPolicy, now: u64) -> Vec<Option<Kept>> {
    let mut marks: Vec<Option<Mark>> = vec![None; candidates.len()];
    // From the newest to the oldest.
    let newest_first: Vec<usize> =
        (0..candidates.len()).rev().filter(|at| candidates[*at].state.has_content()).collect();
    let offset = i64::from(policy.utc_offset_minutes) * 60;
    if let Some(last) = policy.last {
        for at in newest_first.iter().take(last as usize) {
            marks[*at] = Some(Mark::Keep(Kept::Rule(Rule::Last, None)));
        }
    }
    if let Some(seconds) = policy.within_seconds {
        for at in &newest_first {
            // A time in the future is that of a clock that was set back since: the age is 0.
            let age = now.saturating_sub(candidates[*at].time);
            if age < seconds && marks[*at].is_none() {
                marks[*at] = Some(Mark::Keep(Kept::Rule(Rule::Within, None)));
            }
        }
    }
    for (rule, count) in policy.counts() {
        let Some(unit) = unit(rule) else { continue };
        let period = |at: &usize| Period::of(candidates[*at].time, offset, unit);
        let is_kept = |at: &&usize| matches!(marks[**at], Some(Mark::Keep(_)));
        let covered: HashSet<Period> = newest_first.iter().filter(is_kept).map(period).collect();
        let mut used: HashSet<Period> = HashSet::new();
        for at in &newest_first {
            let period = period(at);
            if marks[*at].is_some() || covered.contains(&period) {
                continue;
            }
            if used.contains(&period) {
                marks[*at] = Some(Mark::Skip);
            } else if used.len() < count as usize {
                used.insert(period);
                marks[*at] = Some(Mark::Keep(Kept::Rule(rule, Some(period.to_string()))));
            }
        }
    }
    let kept = |mark| match mark {
        Some(Mark::Keep(why)) => Some(why),
        Some(Mark::Skip) | None => None,
    };
    marks.into_iter().map(kept).collect()
}

/// The periods of a rule, if it has periods.
fn unit(rule: Rule) -> Option<Unit> {
    match rule {
        Rule::Last | Rule::Within => None,
        Rule::Hourly => Some(Unit::Hour),
        Rule::Daily => Some(Unit::Day),
        Rule::Weekly => Some(Unit::Week),
        Rule::Monthly => Some(Unit::Month),
        Rule::Yearly => Some(Unit::Year),
    }
}
