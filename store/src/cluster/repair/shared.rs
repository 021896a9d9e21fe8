//! What all tasks of a repair or of a check share: the peers and their states, and the limits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use super::members::{PeerState, RepairMembers};
use super::rate_limiter::RateLimiter;
use crate::id::PeerId;

/// How often a repair checks whether it has to stop.
pub(super) const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The limits of a repair.
#[derive(Clone, Copy, Debug)]
pub struct RepairLimits {
    /// The most bytes a second, read and written together.
    pub rate: Option<u64>,
    /// The most bytes of blocks in memory. A blob that needs more is repaired alone.
    pub memory: usize,
}

impl Default for RepairLimits {
    fn default() -> RepairLimits {
        RepairLimits { rate: None, memory: 64 << 20 }
    }
}

/// The state that all tasks of a repair share.
pub(super) struct Shared<P> {
    pub(super) peers: Arc<P>,
    rate_limiter: Arc<RateLimiter>,
    inner: Arc<Inner>,
}

struct Inner {
    members: Mutex<RepairMembers>,
    /// The memory for blocks, in KiB.
    memory: Arc<Semaphore>,
    memory_kib: u32,
    stop: AtomicBool,
}

impl<P> Clone for Shared<P> {
    fn clone(&self) -> Self {
        let Shared { peers, rate_limiter, inner } = self;
        Shared { peers: peers.clone(), rate_limiter: rate_limiter.clone(), inner: inner.clone() }
    }
}

impl<P> Shared<P> {
    pub(super) fn new(peers: Arc<P>, members: RepairMembers, limits: RepairLimits) -> Shared<P> {
        let memory_kib =
            (limits.memory / 1024).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize)) as u32;
        let inner = Inner {
            members: Mutex::new(members),
            memory: Arc::new(Semaphore::new(memory_kib as usize)),
            memory_kib,
            stop: AtomicBool::new(false),
        };
        let rate_limiter = Arc::new(RateLimiter::new(limits.rate));
        Shared { peers, rate_limiter, inner: Arc::new(inner) }
    }

    pub(super) fn members(&self) -> RepairMembers {
        self.inner.members.lock().expect("no code panics with the members locked").clone()
    }

    /// Marks a peer that did not answer as down. A draining peer stays draining: what it has is
    /// stored elsewhere.
    pub(super) fn set_down(&self, peer: &PeerId) {
        let mut members =
            self.inner.members.lock().expect("no code panics with the members locked");
        if members.find(peer).is_some_and(|at| members.nodes()[at].state == PeerState::Up) {
            tracing::warn!(%peer, "a peer does not answer; it counts as down");
            members.set_state(peer, PeerState::Down);
        }
    }

    /// Marks a peer that has no space as full.
    pub(super) fn set_full(&self, peer: &PeerId) {
        self.inner.members.lock().expect("no code panics with the members locked").set_full(peer);
    }

    /// Waits until the rate limit allows `bytes` more bytes, or the repair has to stop.
    pub(super) async fn throttle(&self, bytes: u64) {
        let mut wait = self.rate_limiter.take(bytes);
        while wait > Duration::ZERO && !self.is_stopped() {
            let part = wait.min(STOP_CHECK_INTERVAL);
            sleep(part).await;
            wait -= part;
        }
    }

    /// Waits until this many bytes of blocks may be in memory: until the result is dropped.
    pub(super) async fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kib = bytes.div_ceil(1024).clamp(1, self.inner.memory_kib as usize) as u32;
        self.inner.memory.clone().acquire_many_owned(kib).await.ok()
    }

    pub(super) fn stop(&self) {
        self.inner.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.inner.stop.load(Ordering::Relaxed)
    }
}
