//! A bounded set that forgets names that were not used recently.

use std::collections::HashSet;
use std::hash::Hash;

/// The most names in each of the two generations.
const GENERATION_NAMES: usize = 128 << 10;

/// A set of names in two generations. When the young generation is full, it becomes the old one,
/// and the previous old one is forgotten.
pub(crate) struct RecentSet<T> {
    young: HashSet<T>,
    old: HashSet<T>,
    limit: usize,
}

impl<T> Default for RecentSet<T> {
    fn default() -> RecentSet<T> {
        RecentSet { young: HashSet::new(), old: HashSet::new(), limit: GENERATION_NAMES }
    }
}

impl<T: Hash + Eq + Copy> RecentSet<T> {
    /// Whether the set contains a name. A name that is found stays for another generation.
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

    /// Adds a name.
    pub(crate) fn insert(&mut self, name: T) {
        if self.young.len() >= self.limit {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(name);
    }

    /// Removes all names.
    pub(crate) fn clear(&mut self) {
        (self.young, self.old) = Default::default();
    }
}

#[cfg(test)]
mod tests {
    use super::RecentSet;

    #[test]
    fn names_that_are_used_stay_and_others_are_forgotten() {
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
