//! Forgetting mirrors: on request, or because no process has used them for a long time.
//!
//! A mirror is forgotten in one change that relies on its document and on the image's lease. So a
//! process that attaches the mirror meanwhile, or notes that it uses it, wins.

use super::Catalog;
use super::documents::{
    ImageDocument, MirrorDocument, image_key, lease_key, live_lease, mirror_key,
};
use super::mirrors::{Holding, without_writer};
use crate::documents::{Change, Query};
use crate::encoding::StoragePolicy;
use crate::error::{Error, Result};
use crate::id::MirrorId;
use crate::process::Process;
use crate::snapshot::MirrorRecord;

/// When a mirror counts as unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnusedRule {
    /// Seconds for which no process has used it.
    pub(crate) least: u64,
    /// Seconds since 1970.
    pub(crate) now: u64,
}

/// Whether a process uses a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MirrorUse {
    /// A process holds the image's lease for it.
    Writing {
        /// The process, on the mirror's host.
        pid: u32,
    },
    /// It was used this many seconds ago, which is too short a time.
    Recent(u64),
    /// By this host's clock, it was used this many seconds from now. One of the two clocks was or is
    /// wrong, so nobody knows when it was used.
    Future(u64),
    /// It was not used for this many seconds.
    Unused(u64),
}

impl UnusedRule {
    pub(crate) fn judge(&self, mirror: &MirrorRecord) -> MirrorUse {
        match (mirror.writer, self.now.checked_sub(mirror.seen)) {
            (Some(pid), _) => MirrorUse::Writing { pid },
            (None, None) => MirrorUse::Future(mirror.seen - self.now),
            (None, Some(ago)) if ago < self.least => MirrorUse::Recent(ago),
            (None, Some(ago)) => MirrorUse::Unused(ago),
        }
    }
}

/// A mirror that was forgotten.
pub(crate) struct Forgotten {
    /// The storage policy of its image, if the image exists.
    pub(crate) policy: Option<StoragePolicy>,
}

impl Catalog {
    /// Removes a mirror, and its lease. Fails if the lease is live.
    pub(crate) fn forget_mirror(&self, id: &MirrorId) -> Result<Forgotten> {
        let forgotten = self.forget_mirror_if(id, None)?;
        Ok(forgotten.expect("without a rule, a mirror that stays is an error"))
    }

    /// Removes a mirror, and its lease, if the mirror is unused. Otherwise returns its use. Returns
    /// `None` if there is no such mirror.
    pub(crate) fn forget_unused_mirror(
        &self,
        id: &MirrorId,
        rule: &UnusedRule,
    ) -> Result<Option<std::result::Result<Forgotten, MirrorUse>>> {
        match self.forget_mirror_if(id, Some(rule)) {
            Err(Error::NoMirror { .. }) => Ok(None),
            forgotten => forgotten.map(Some),
        }
    }

    fn forget_mirror_if(
        &self,
        id: &MirrorId,
        rule: Option<&UnusedRule>,
    ) -> Result<std::result::Result<Forgotten, MirrorUse>> {
        let observer = Process::current()?;
        let unknown = || Error::NoMirror { id: id.to_string() };
        let key = mirror_key(id);
        let found = self.read(&[Query::key(&key)])?.get::<MirrorDocument>(&key)?;
        let MirrorDocument { image: name, image_id, .. } = found.ok_or_else(unknown)?;
        let queries =
            [Query::key(&key), Query::Key(image_key(&name)), Query::Key(lease_key(&image_id))];
        self.change(&queries, |view| {
            let mirror = view.get::<MirrorDocument>(&key)?.ok_or_else(unknown)?;
            let lease = live_lease(view, &image_id, &observer)?;
            let own = lease.as_ref().filter(|lease| lease.mirror == *id);
            match (rule, own) {
                (None, Some(lease)) => return Err(lease.conflict(&name)),
                (None, None) => {}
                (Some(rule), _) => match rule.judge(&mirror.record(*id, lease, &observer)) {
                    MirrorUse::Unused(_) => {}
                    used => return Ok((Change::default(), Err(used))),
                },
            }
            let change = Change::default().remove(Query::key(&key));
            let document = view.get::<ImageDocument>(&image_key(&name))?;
            let document = document.filter(|image| image.id == image_id);
            let policy = document.as_ref().map(ImageDocument::policy);
            let change = without_writer(change, &Holding { id, name: &name, document });
            Ok((change, Ok(Forgotten { policy })))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{MirrorUse, UnusedRule};
    use crate::id::MirrorId;
    use crate::snapshot::{MirrorRecord, Mode};
    use crate::tree::Root;

    #[test]
    fn a_mirror_is_unused_only_if_it_was_seen_long_ago_and_has_no_writer() {
        let day = 86_400;
        let rule = UnusedRule { least: 30 * day, now: 100 * day };
        let judge = |seen, writer| {
            rule.judge(&MirrorRecord {
                id: MirrorId::from_bytes([1; 16]),
                image: "vm1".parse().unwrap(),
                host: "a".into(),
                path: "/m".into(),
                mode: Mode::ReadWrite,
                parent: 1,
                root: Root(None),
                attached: 0,
                seen,
                is_ephemeral: false,
                writer,
            })
        };
        assert_eq!(judge(70 * day, None), MirrorUse::Unused(30 * day));
        assert_eq!(judge(70 * day + 1, None), MirrorUse::Recent(30 * day - 1));
        assert_eq!(judge(100 * day, None), MirrorUse::Recent(0));
        // A clock was set forward while the mirror ran, or this host's is behind.
        assert_eq!(judge(100 * day + 1, None), MirrorUse::Future(1));
        assert_eq!(judge(u64::MAX, None), MirrorUse::Future(u64::MAX - 100 * day));
        assert_eq!(judge(0, None), MirrorUse::Unused(100 * day));
        // It runs, whatever the clocks show.
        for seen in [0, 70 * day, 1000 * day] {
            assert_eq!(judge(seen, Some(7)), MirrorUse::Writing { pid: 7 });
        }
    }
}
