//! Queries as ranges of keys.

use super::Query;

/// The keys from `begin` up to, but not including, `end`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyRange {
    pub(super) begin: String,
    pub(super) end: String,
}

/// The end of the range of keys that begin with `prefix`. No key contains this character.
pub(super) fn prefix_end(prefix: &str) -> String {
    format!("{prefix}\u{10ffff}")
}

/// The keys that match any of these queries: ranges in the order of the keys, without overlaps.
pub(super) fn ranges(queries: &[Query]) -> Vec<KeyRange> {
    let range = |query: &Query| match query {
        // No other key lies between a key and itself with a zero behind it.
        Query::Key(key) => KeyRange { begin: key.clone(), end: format!("{key}\0") },
        Query::Prefix(prefix) => KeyRange { begin: prefix.clone(), end: prefix_end(prefix) },
    };
    let mut all: Vec<_> = queries.iter().map(range).collect();
    all.sort_by(|one, other| one.begin.cmp(&other.begin));
    let mut merged: Vec<KeyRange> = Vec::with_capacity(all.len());
    for next in all {
        match merged.last_mut() {
            Some(last) if next.begin < last.end => last.end = next.end.max(last.end.clone()),
            _ => merged.push(next),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};

    use super::{Query, ranges};

    fn query() -> impl Strategy<Value = Query> {
        (any::<bool>(), "[ab/]{0,3}").prop_map(|(whole, text)| match whole {
            true => Query::Key(text),
            false => Query::Prefix(text),
        })
    }

    proptest! {
        #[test]
        fn ranges_have_the_keys_of_the_queries_each_once_and_in_order(
            queries in vec(query(), 0..6),
            keys in vec("[ab/\u{0}]{0,4}", 0..20),
        ) {
            let ranges = ranges(&queries);
            prop_assert!(ranges.iter().all(|one| one.begin < one.end));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].begin));
            for key in keys {
                let matches = queries.iter().any(|query| match query {
                    Query::Key(one) => *one == key,
                    Query::Prefix(prefix) => key.starts_with(prefix.as_str()),
                });
                let inside = ranges.iter().any(|one| one.begin <= key && key < one.end);
                prop_assert_eq!(inside, matches, "{:?}", key);
            }
        }
    }
}
