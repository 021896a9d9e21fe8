//! Deletes the surplus of one blob, after what is kept was compared with the blob's name.
//!
//! ```text
//! read all kept fragments ─► decode, hash, compare each ─► delete the surplus
//!                                     │
//!                                     └─► a fragment or the encoding is wrong: delete nothing
//! ```
//!
//! Nothing is deleted on the word of a checksum alone. A checksum protects from damage. It does not
//! protect from a peer that forges, or from a client whose memory flipped a bit before it encoded a
//! blob. If the kept encoding turns out to be wrong, the other one is the only one that can be read.

use super::execute::Executor;
use super::peers::Peers;
use super::plan::{FragmentLocation, Removal};
use super::verify::{Verdict, verify};
use crate::encoding::fragment::Fragment;
use crate::encoding::redundancy::Redundancy;

/// A surplus copy is deleted only if no client has stored or renewed it for this many seconds. A
/// client may be storing the blob with more copies than the catalog wants so far, and a large image
/// takes hours.
const SURPLUS_AGE_SECONDS: u32 = 24 * 3600;

/// Proof that all kept fragments of a blob were read, decoded and compared with the blob's name.
/// Only [`Executor::verify`] makes one, and no surplus is deleted without one.
struct Verified(());

impl<P: Peers> Executor<'_, P> {
    /// Deletes the surplus, if what is kept is right. Otherwise notes what is wrong, so that the
    /// next plan does without it.
    pub(super) async fn remove(&mut self, removal: &Removal) {
        let Some(verified) = self.verify(&removal.kept).await else { return };
        for place in &removal.surplus {
            // The reads may have taken long. Another repair may run by then.
            if self.shared.is_stopped() || !self.delete(&verified, place).await {
                return;
            }
        }
    }

    /// Reads all kept fragments and compares them with the blob's name.
    async fn verify(&mut self, kept: &[FragmentLocation]) -> Option<Verified> {
        let found = self.get_all(kept).await;
        if found.len() < kept.len() {
            return None;
        }
        let (places, fragments): (Vec<_>, Vec<Fragment>) = found.into_iter().unzip();
        let description = fragments.first()?.description.clone();
        match verify(&description, &fragments) {
            Verdict::Decoded { wrong } if wrong.is_empty() => Some(Verified(())),
            Verdict::Decoded { wrong } => {
                wrong.into_iter().for_each(|at| self.note_forged(&places[at]));
                None
            }
            Verdict::Rejected(rejection) => {
                let reason = "it does not give the blob".to_owned();
                self.reject(description.id(), rejection, reason);
                None
            }
        }
    }

    /// Deletes a surplus fragment. Of fragments, all that are needed are kept. Of copies, nobody
    /// knows how many a client wants that has not published yet, so their number never decreases
    /// unless they are old. A fragment that is wrong helps no client. Returns whether the peer
    /// answered.
    async fn delete(&mut self, _: &Verified, place: &FragmentLocation) -> bool {
        let findings = &self.entry.findings;
        let is_wrong =
            findings.forged.contains(place) || findings.rejected.contains_key(&place.encoding);
        let is_copy = matches!(self.entry.wanted.redundancy, Redundancy::Replicas(_));
        let ignores_age = is_wrong || !is_copy || self.entry.stored > 0;
        let idle = if ignores_age { 0 } else { SURPLUS_AGE_SECONDS };
        let deleted = self.shared.peers.delete(place.peer, &[self.id(place)], idle).await;
        match deleted {
            Ok(bytes) => {
                self.done.dropped += u64::from(bytes > 0 || ignores_age);
                self.entry.findings.forged.remove(place);
                match ignores_age {
                    true if is_wrong => {}
                    true => self.entry.stored = self.entry.stored.saturating_sub(1),
                    false => drop(self.entry.spared.insert(*place)),
                }
                true
            }
            Err(error) => {
                self.fail(&place.peer, &error);
                false
            }
        }
    }

    /// Deletes a fragment that was compared with the decoded blob and differs, before the right one
    /// is stored in its place. Returns whether it is gone.
    pub(super) async fn delete_forged(&mut self, place: &FragmentLocation) -> bool {
        match self.shared.peers.delete(place.peer, &[self.id(place)], 0).await {
            Ok(_) => true,
            Err(error) => {
                self.fail(&place.peer, &error);
                false
            }
        }
    }
}
