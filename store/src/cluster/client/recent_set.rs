//! A bounded set that forgets what was not asked for lately.

use std::collections::HashSet;
use std::hash::Hash;

/// Names of each of two generations.
const GENERATION: usize = 128 << 10;

/// A set of names in two generations: when the young one is full, the old one is forgotten.
pub(crate) struct RecentSet<T> {
    young: HashSet<T>,
    old: HashSet<T>,
    limit: usize,
}

impl<T> Default for RecentSet<T> {
    fn default() -> RecentSet<T> {
        RecentSet { young: HashSet::new(), old: HashSet::new(), limit: GENERATION }
    }
}

impl<T: Hash + Eq + Copy> RecentSet<T> {
    /// Whether it is known. What is asked for stays.
    pub(crate) fn contains(&mut self, name: &T) -> bool {
        if self.young.contains(name) {
            return true;
        }
        let found = self.old.contains(name);
        if found {
            self.insert(*name);
        }
        found
    }

    /// Remembers a name.
    pub(crate) fn insert(&mut self, name: T) {
        if self.young.len() >= self.limit {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(name);
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        (self.young, self.old) = Default::default();
    }
}

#[cfg(test)]
mod tests {
    use super::RecentSet;

    #[test]
    fn what_is_used_stays_and_the_rest_is_forgotten_in_time() {
        let mut names = RecentSet { limit: 100, ..RecentSet::default() };
        for name in 0..10_000 {
            names.insert(name);
            assert!(names.contains(&7) == (name >= 7));
            assert!(names.young.len() <= 100 && names.old.len() <= 100);
        }
        assert!(!names.contains(&8) && names.contains(&9_990));
        names.clear();
        assert!(!names.contains(&7) && !names.contains(&9_990));
    }
}
