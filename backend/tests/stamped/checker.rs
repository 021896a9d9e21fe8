//! Checks a snapshot.
//!
//! A snapshot is right when there is one moment between its request and its answer such that every
//! unit has a state it could have had at that moment. A unit's state after its `k`-th write is
//! possible from the submission of that write to the acknowledgement of the next one. So each
//! state that matches the unit's bytes gives an interval, and the snapshot is right when all units'
//! intervals and the one from request to answer have a moment in common.
//!
//! Intervals on a line have a common point exactly when each two of them have one. So this says the
//! same as: nothing acknowledged before the request is lacking, nothing submitted after the answer
//! is there, and no write is lacking that was acknowledged before one that is there was submitted.

use std::fmt;
use std::ops::{Range, RangeInclusive};

use super::history::{Base, History, Moment, NEVER, Write};
use super::stamp::{self, Content, SECTOR, WriteId};

/// A snapshot, with the moments of its request and its answer.
pub(crate) struct Snapshot<'a> {
    pub(crate) name: String,
    pub(crate) requested: Moment,
    pub(crate) answered: Moment,
    pub(crate) disk: &'a [u8],
}

/// What is wrong with a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// Bytes that nobody wrote there.
    Garbage { sector: u64, what: String },
    /// The sectors of one unit belong to different states.
    Torn { unit: usize, found: Vec<Option<WriteId>> },
    /// A write is missing that was acknowledged before the request.
    Lost { unit: usize, write: WriteId, acknowledged: Moment, requested: Moment },
    /// A write is present that was submitted after the answer.
    Future { unit: usize, write: WriteId, submitted: Moment, answered: Moment },
    /// `lacking` was acknowledged before `held` was submitted.
    NotACut { lacking: (usize, WriteId, Moment), held: (usize, WriteId, Moment) },
    /// Each unit is correct alone, but no single moment explains all of them.
    NoCommonMoment { unit: usize },
    /// The snapshot has another size than the disk.
    Size { expected: usize, found: usize },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::Garbage { sector, what } => write!(f, "sector {sector} holds {what}"),
            Violation::Torn { unit, found } => write!(f, "unit {unit} is torn: {found:?}"),
            Violation::Lost { unit, write, acknowledged, requested } => write!(
                f,
                "unit {unit} lacks write {write}, acknowledged at {acknowledged}, before the \
                 request at {requested}"
            ),
            Violation::Future { unit, write, submitted, answered } => write!(
                f,
                "unit {unit} holds write {write}, submitted at {submitted}, after the answer at \
                 {answered}"
            ),
            Violation::NotACut { lacking, held } => write!(
                f,
                "unit {} lacks write {}, acknowledged at {}, yet unit {} holds write {}, \
                 submitted at {}",
                lacking.0, lacking.1, lacking.2, held.0, held.1, held.2
            ),
            Violation::NoCommonMoment { unit } => {
                write!(f, "no moment explains unit {unit} and the others")
            }
            Violation::Size { expected, found } => {
                write!(f, "the snapshot has {found} bytes instead of {expected}")
            }
        }
    }
}

/// Statistics of a correct snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Writes that were in flight during the checkpoint, which may or may not be in it.
    pub(crate) in_flight: usize,
    /// Of these, the writes that the snapshot holds in one unit and lacks in another. The guest
    /// cannot tell, because such a write was not acknowledged.
    pub(crate) split: usize,
}

/// A state that a unit may be in: the moments at which it is possible, and the writes around it.
struct State<'a> {
    during: RangeInclusive<Moment>,
    last: Option<&'a Write>,
    next: Option<&'a Write>,
}

/// Checks `snapshot`. Returns the first violations if it is wrong.
pub(crate) fn check(history: &History, snapshot: &Snapshot) -> Result<Verdict, Vec<Violation>> {
    let expected = history.base.len() * SECTOR;
    if snapshot.disk.len() != expected {
        return Err(vec![Violation::Size { expected, found: snapshot.disk.len() }]);
    }
    let mut violations = Vec::new();
    let mut certain: Vec<(usize, State)> = Vec::new();
    let mut ambiguous: Vec<(usize, Vec<State>)> = Vec::new();
    for unit in 0..history.units.len() {
        match states_of(history, snapshot, unit) {
            Ok(mut states) if states.len() == 1 => {
                certain.push((unit, states.pop().expect("there is one")));
            }
            Ok(states) => ambiguous.push((unit, states)),
            Err(violation) => violations.push(violation),
        }
        if violations.len() >= 8 {
            return Err(violations);
        }
    }
    if !violations.is_empty() {
        return Err(violations);
    }
    let cut = common_moment(snapshot, &certain, &ambiguous).map_err(|v| vec![v])?;
    Ok(count(history, snapshot, &certain, &ambiguous, cut))
}

/// The states of `unit` that match its bytes and are possible between request and answer.
fn states_of<'a>(
    history: &'a History,
    snapshot: &Snapshot,
    unit: usize,
) -> Result<Vec<State<'a>>, Violation> {
    let mut found = Vec::with_capacity(history.unit_sectors as usize);
    for sector in history.sectors_of(unit) {
        let at = sector as usize * SECTOR;
        match stamp::read(&snapshot.disk[at..at + SECTOR], sector, history.seed) {
            Content::Garbage(what) => return Err(Violation::Garbage { sector, what }),
            Content::Zeros => found.push(None),
            Content::Write(id) => found.push(Some(id)),
        }
    }
    let writes = &history.units[unit];
    let write = |k: usize| &history.writes[writes[k] as usize];
    // State k is the one after k writes. Acknowledgements and submissions ascend with k.
    let write_at = |&index: &u32| &history.writes[index as usize];
    let first = writes.partition_point(|index| write_at(index).acknowledged < snapshot.requested);
    let end = writes.partition_point(|index| write_at(index).submitted <= snapshot.answered);
    let matching = |range: RangeInclusive<usize>| -> Vec<usize> {
        let mut state = state_after(history, unit, *range.start());
        let mut matching = Vec::new();
        for k in range.clone() {
            if k > *range.start() {
                apply(write(k - 1), history.sectors_of(unit), &mut state);
            }
            if state == found {
                matching.push(k);
            }
        }
        matching
    };
    let states: Vec<State> = matching(first..=end)
        .into_iter()
        .map(|k| {
            let last = k.checked_sub(1).map(write);
            let next = (k < writes.len()).then(|| write(k));
            let from = last.map_or(0, |write| write.submitted);
            let to = next.map_or(NEVER, |write| write.acknowledged);
            State { during: from..=to, last, next }
        })
        .collect();
    if !states.is_empty() {
        return Ok(states);
    }
    Err(match matching(0..=writes.len()).pop() {
        None => Violation::Torn { unit, found },
        Some(k) if k < first => Violation::Lost {
            unit,
            write: write(k).id,
            acknowledged: write(k).acknowledged,
            requested: snapshot.requested,
        },
        Some(k) => Violation::Future {
            unit,
            write: write(k - 1).id,
            submitted: write(k - 1).submitted,
            answered: snapshot.answered,
        },
    })
}

/// What each sector of `unit` holds after the first `k` of the unit's writes: a write's stamp or,
/// as `None`, zeros.
fn state_after(history: &History, unit: usize, k: usize) -> Vec<Option<WriteId>> {
    let writes = &history.units[unit][..k];
    let content = |sector| {
        let writes = writes.iter().rev().map(|&index| &history.writes[index as usize]);
        match writes.clone().find(|write| write.sectors.contains(&sector)) {
            Some(write) => write.leaves(),
            None if history.base[sector as usize] == Base::Stamped => Some(0),
            None => None,
        }
    };
    history.sectors_of(unit).map(content).collect()
}

fn apply(write: &Write, sectors: Range<u64>, state: &mut [Option<WriteId>]) {
    for (sector, place) in sectors.zip(state) {
        if write.sectors.contains(&sector) {
            *place = write.leaves();
        }
    }
}

/// A moment that explains the state of all units, if there is one.
fn common_moment(
    snapshot: &Snapshot,
    certain: &[(usize, State)],
    ambiguous: &[(usize, Vec<State>)],
) -> Result<Moment, Violation> {
    let latest = certain.iter().max_by_key(|(_, state)| *state.during.start());
    let earliest = certain.iter().min_by_key(|(_, state)| *state.during.end());
    if let (Some((held, h)), Some((lacking, l))) = (latest, earliest)
        && h.during.start() > l.during.end()
    {
        let held_write = h.last.expect("only a write begins a state");
        let lacking_write = l.next.expect("only a later write ends a state");
        return Err(Violation::NotACut {
            lacking: (*lacking, lacking_write.id, lacking_write.acknowledged),
            held: (*held, held_write.id, held_write.submitted),
        });
    }
    let from = latest.map_or(0, |(_, state)| *state.during.start()).max(snapshot.requested);
    let to = earliest.map_or(NEVER, |(_, state)| *state.during.end()).min(snapshot.answered);
    let mut possible = vec![from..=to];
    for (unit, states) in ambiguous {
        let mut left = Vec::new();
        for here in &possible {
            for state in states {
                let from = *here.start().max(state.during.start());
                let to = *here.end().min(state.during.end());
                if from <= to {
                    left.push(from..=to);
                }
            }
        }
        if left.is_empty() {
            return Err(Violation::NoCommonMoment { unit: *unit });
        }
        possible = united(left);
    }
    Ok(*possible[0].start())
}

/// The same moments in as few ranges as possible, in order. Without this, ranges that overlap would
/// double in number with each unit.
fn united(mut ranges: Vec<RangeInclusive<Moment>>) -> Vec<RangeInclusive<Moment>> {
    ranges.sort_by_key(|range| *range.start());
    let mut united: Vec<RangeInclusive<Moment>> = Vec::new();
    for range in ranges {
        match united.last_mut() {
            Some(last) if range.start() <= last.end() => {
                *last = *last.start()..=*last.end().max(range.end());
            }
            _ => united.push(range),
        }
    }
    united
}

fn count(
    history: &History,
    snapshot: &Snapshot,
    certain: &[(usize, State)],
    ambiguous: &[(usize, Vec<State>)],
    cut: Moment,
) -> Verdict {
    let mut held = std::collections::HashSet::new();
    let mut lacking = std::collections::HashSet::new();
    let chosen = ambiguous.iter().map(|(_, states)| {
        let state = states.iter().find(|state| state.during.contains(&cut));
        state.expect("the moment was chosen so")
    });
    for state in certain.iter().map(|(_, state)| state).chain(chosen) {
        held.extend(state.last.map(|write| write.id));
        lacking.extend(state.next.map(|write| write.id));
    }
    let under_way = |write: &&Write| {
        write.submitted <= snapshot.answered && write.acknowledged >= snapshot.requested
    };
    let in_flight = history.writes.iter().filter(under_way);
    let split = in_flight.clone().filter(|w| held.contains(&w.id) && lacking.contains(&w.id));
    Verdict { in_flight: in_flight.clone().count(), split: split.count() }
}
