//! A client's view of the members, which costs the catalog little.
//!
//! | the cluster has | the client reads | when |
//! |---|---|---|
//! | an acting supervisor | the document of the supervisor | every two seconds |
//! | | the members that have changed | when one has changed |
//! | | all members | every [`FULL_READ_INTERVAL`] |
//! | no supervisor | all members and heartbeats | every two seconds |
//!
//! An acting supervisor notes in `members/ID` that a peer is down, and the peer's next heartbeat
//! takes that back. So heartbeats cost clients nothing, and a change of state reaches them at once.
//! The document of a supervisor that has died expires after ten seconds; from then on the clients
//! read the heartbeats themselves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{MEMBERS, MemberDocument, Peer, SUPERVISOR, peers};
use crate::cluster::placement::members::{Member, MemberState};
use crate::documents::{Document, Documents, Query};
use crate::error::Result;
use crate::id::PeerId;

/// How often all members are read again. Changes alone are not enough if the catalog was restored
/// from a backup: its revisions begin at an earlier one.
const FULL_READ_INTERVAL: Duration = Duration::from_secs(300);

/// The members as a client knows them.
#[derive(Default)]
pub(crate) struct MembersView {
    /// The revision up to which changes are known.
    revision: u64,
    documents: BTreeMap<PeerId, MemberDocument>,
    /// When all documents were read last; `None` if they must be read again.
    full_read: Option<Instant>,
}

impl MembersView {
    /// The revision to wait for changes after.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// Reads what may have changed. Returns all members, or `None` if nothing has changed.
    /// `has_changed` says whether a document in the folder of the members may have changed since
    /// [`MembersView::revision`].
    pub(crate) fn update(
        &mut self,
        documents: &dyn Documents,
        has_changed: bool,
    ) -> Result<Option<Vec<Member>>> {
        let supervisor = documents.read(&[Query::key(SUPERVISOR)])?;
        if supervisor.version(SUPERVISOR) == 0 {
            let (peers, revision) = peers(documents)?;
            *self = MembersView { revision, ..MembersView::default() };
            return Ok(Some(peers.iter().filter_map(Peer::member).collect()));
        }
        let is_due = self.full_read.is_none_or(|at| at.elapsed() >= FULL_READ_INTERVAL);
        if !has_changed && !is_due {
            return Ok(None);
        }
        if is_due || !self.read_changes(documents)? {
            self.read_all(documents)?;
        }
        Ok(Some(self.documents.iter().filter_map(|(id, one)| member(*id, one)).collect()))
    }

    /// Reads the documents that have changed. Returns `false` if some were removed.
    fn read_changes(&mut self, documents: &dyn Documents) -> Result<bool> {
        let changed = documents.changed(MEMBERS, self.revision)?;
        let is_same_catalog = changed.view.revision >= self.revision;
        self.add(&changed.view.documents, changed.view.revision)?;
        Ok(is_same_catalog && self.documents.len() as u64 == changed.total)
    }

    fn read_all(&mut self, documents: &dyn Documents) -> Result<()> {
        let view = documents.read(&[Query::prefix(MEMBERS)])?;
        self.documents.clear();
        self.add(&view.documents, view.revision)?;
        self.full_read = Some(Instant::now());
        Ok(())
    }

    fn add(&mut self, documents: &BTreeMap<String, Document>, revision: u64) -> Result<()> {
        for (key, document) in documents {
            let id = key[MEMBERS.len()..].parse()?;
            let member = document.decode(key).unwrap_or_else(|error| {
                tracing::warn!(%error, "a peer has written a wrong document; run `cairn peers`");
                MemberDocument::unreadable()
            });
            self.documents.insert(id, member);
        }
        self.revision = revision;
        Ok(())
    }
}

/// The member that its document describes, while a supervisor acts; `None` if it is lost.
fn member(id: PeerId, document: &MemberDocument) -> Option<Member> {
    let state = match document {
        MemberDocument { lost: true, .. } => return None,
        MemberDocument { down_since: Some(_), .. } => MemberState::Down,
        MemberDocument { draining: true, .. } => MemberState::Draining,
        _ => MemberState::Up,
    };
    Some(Member {
        id,
        address: document.address.clone(),
        weight: document.weight,
        domain: document.domain.clone(),
        state,
    })
}
