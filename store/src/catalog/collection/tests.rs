//! Which beginnings of collections are remembered.

use super::{BegunCollection, MAX_REMEMBERED, remember};
use crate::collection::CollectionNumber;

/// A collection every minute for weeks. Without an old one, nothing would ever be older than the grace
/// period.
#[test]
fn a_collection_from_before_each_grace_period_is_remembered() {
    let mut begun = Vec::new();
    for minute in 0..50_000 {
        let number = CollectionNumber(minute + 1);
        remember(&mut begun, BegunCollection { number, time: minute * 60 });
        assert!(begun.len() <= MAX_REMEMBERED && begun.is_sorted_by_key(|one| one.number));
    }
    let now = 50_000 * 60;
    for grace in [60, 3600, 24 * 3600, 7 * 24 * 3600] {
        let old = begun.iter().rfind(|one| one.time <= now - grace);
        let age = old.map(|one| now - one.time);
        assert!(age.is_some_and(|age| age <= grace * 5 / 4 + 60), "{grace} s: {age:?}");
    }
}
