//! A backend that is under attack by its guest or its hypervisor.

use std::time::Duration;

use super::Guest;
use crate::support::backend::{Backend, IMAGE, Options, Site};
use crate::support::repository;

/// The size of a target's disk.
pub(crate) const SIZE: u64 = 4 << 20;

/// A backend under attack.
pub(crate) struct Target {
    pub(crate) backend: Backend,
    round: u8,
    // Dropped after the process that uses it.
    _site: Site,
}

impl Target {
    pub(crate) fn new() -> Target {
        let site = Site::new();
        repository::create(&site.store(), IMAGE, 64 << 10, SIZE);
        let backend = Backend::start(&Options::new(&site));
        Target::with(site, backend)
    }

    /// The target whose `backend` uses `site`.
    pub(crate) fn with(site: Site, backend: Backend) -> Target {
        Target { backend, round: 0, _site: site }
    }

    pub(crate) fn guest(&self) -> Guest {
        Guest::connect(&self.backend.options.socket)
    }

    /// Checks that the disk serves: through `guest` itself, or through a new guest if its
    /// connection or queue was given up.
    pub(crate) fn still_serves(&mut self, guest: Guest, attack: &str) -> Guest {
        let mut guest = guest;
        self.backend.assert_alive();
        self.round = self.round.wrapping_add(1).max(1);
        if guest.works_within(Duration::from_secs(2), 8, self.round) {
            return guest;
        }
        drop(guest);
        let mut guest = self.guest();
        assert!(guest.works(16, self.round), "after: {attack}");
        self.backend.assert_alive();
        guest
    }
}
