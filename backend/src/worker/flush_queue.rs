//! The flushes of one virtqueue.
//!
//! One flush operation runs at a time, for all requests that had come before it started. Requests
//! that come while it runs need another one, and share that.

use super::queue::Chain;

#[derive(Default)]
pub(super) struct FlushQueue {
    waiting: Vec<Chain>,
    /// The requests that the running operation is for.
    running: Vec<Chain>,
}

impl FlushQueue {
    pub(super) fn push(&mut self, chain: Chain) {
        self.waiting.push(chain);
    }

    /// Returns whether an operation has to be started for the requests that wait.
    pub(super) fn start(&mut self) -> bool {
        if !self.running.is_empty() || self.waiting.is_empty() {
            return false;
        }
        self.running = std::mem::take(&mut self.waiting);
        true
    }

    /// The operation has ended: returns its requests.
    pub(super) fn finish(&mut self) -> Vec<Chain> {
        std::mem::take(&mut self.running)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }
}
