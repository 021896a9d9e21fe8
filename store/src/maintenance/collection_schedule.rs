//! When the supervisor collects.
//!
//! The catalog knows when the last collection was completed, whoever ran it. The document
//! `health/collection` has the time of the supervisors' last attempt. A supervisor writes it before it
//! begins, so of two of them that act at the same moment one begins.
//!
//! | situation | the next collection |
//! |---|---|
//! | nothing is known | `RETRY` after a supervisor has seen that: there is something to collect later |
//! | the last attempt was completed, or somebody has completed one since | an interval after that |
//! | the last attempt was not completed: it failed, or was killed | `RETRY` after it began |
//! | a time lies in the future: a clock was set back since | at once |
//!
//! An interval below `RETRY` takes its place.

use std::time::Duration;

use crate::documents::{Change, Query};
use crate::error::Result;
use crate::repository::Repository;

/// The document with the time of the last attempt, in seconds since 1970.
const LAST_ATTEMPT: &str = "health/collection";

/// The interval after an attempt that was not completed.
const RETRY: Duration = Duration::from_secs(600);

/// Returns whether a collection should begin now, in seconds since 1970. If so, notes that it does.
pub(super) fn is_collection_due(
    repository: &Repository,
    interval: Duration,
    now: u64,
) -> Result<bool> {
    let completed = repository.catalog().last_collection()?.map(|last| last.time);
    let documents = repository.documents();
    let view = documents.read(&[Query::key(LAST_ATTEMPT)])?;
    let attempted: Option<u64> = view.get(LAST_ATTEMPT)?;
    let is_due = is_due(attempted, completed, interval, now);
    if !is_due && (attempted, completed) != (None, None) {
        return Ok(false);
    }
    let mut change = Change::default().put(LAST_ATTEMPT, &now);
    change.relies_on.push((LAST_ATTEMPT.into(), view.version(LAST_ATTEMPT)));
    Ok(documents.commit(&change)? && is_due)
}

fn is_due(attempted: Option<u64>, completed: Option<u64>, interval: Duration, now: u64) -> bool {
    let interval = interval.as_secs().max(1);
    let has_passed = |since: u64, seconds| since > now || now - since >= seconds;
    match (attempted, completed) {
        (None, None) => false,
        (Some(attempted), completed) if completed.is_none_or(|time| time < attempted) => {
            has_passed(attempted, interval.min(RETRY.as_secs()))
        }
        (_, completed) => completed.is_some_and(|completed| has_passed(completed, interval)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{is_collection_due, is_due};
    use crate::maintenance::collection::{CollectionOptions, collect};
    use crate::repository::Repository;

    const DAY: u64 = 86_400;
    const NOW: u64 = 1000 * DAY;

    #[test]
    fn a_collection_is_due_an_interval_after_the_last_one_and_soon_after_a_failed_one() {
        let due =
            |attempted, completed| is_due(attempted, completed, Duration::from_secs(DAY), NOW);
        assert!(!due(None, None));
        for (ago, is_due) in [(DAY, true), (DAY - 1, false), (0, false)] {
            assert_eq!(due(None, Some(NOW - ago)), is_due, "{ago}");
            assert_eq!(due(Some(NOW - ago - 5), Some(NOW - ago)), is_due, "{ago}");
            assert_eq!(due(Some(NOW - ago), Some(NOW - ago)), is_due, "{ago}");
        }
        // It failed, or was killed.
        for completed in [None, Some(NOW - 2 * DAY)] {
            assert!(!due(Some(NOW - 599), completed));
            assert!(due(Some(NOW - 600), completed));
        }
        // The clock was ahead by years when it was completed, or attempted.
        assert!(due(None, Some(NOW + 900 * DAY)));
        assert!(due(Some(NOW + 900 * DAY), Some(NOW - 10)));
        assert!(due(Some(NOW + 900 * DAY), Some(NOW + 900 * DAY)));
        // The clock was set back while it ran: it counts as failed, once.
        assert!(due(Some(NOW + 10), Some(NOW)));
        // A short interval is that of a failed one, too.
        let often =
            |attempted, completed| is_due(attempted, completed, Duration::from_secs(2), NOW);
        assert!(often(Some(NOW - 2), None) && !often(Some(NOW - 1), None));
    }

    #[test]
    fn of_all_supervisors_one_begins_a_collection_and_one_that_was_killed_is_made_up_for() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("dir:{}", dir.path().join("repository").display());
        let one = Repository::open_or_create(&url).unwrap();
        let other = Repository::open(&url).unwrap();
        let begins = |now| {
            let supervisors = [&one, &other, &one];
            let begins =
                |repository| is_collection_due(repository, Duration::from_secs(DAY), now).unwrap();
            supervisors.into_iter().filter(|one| begins(one)).count()
        };
        let now = crate::clock::now();
        assert_eq!(begins(now), 0, "nobody knows whether one is needed");
        assert_eq!(begins(now + 599), 0);
        assert_eq!(begins(now + 600), 1, "whoever looks first");
        // It was killed.
        assert_eq!(begins(now + 1199), 0);
        assert_eq!(begins(now + 1200), 1);
        // The clock steps back by more than that, and the next attempt succeeds.
        assert_eq!(begins(now - 7), 1);
        collect(&one, &CollectionOptions::default(), &|_| ()).unwrap();
        let completed = one.catalog().last_collection().unwrap().unwrap().time;
        assert_eq!(begins(completed + DAY - 1), 0);
        assert_eq!(begins(completed + DAY), 1);
    }
}
