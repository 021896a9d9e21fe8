//! The flushes of one virtqueue.
//!
//! One flush operation runs at a time, for all requests that had come before it started. Requests
//! that come while it runs need another one, and share that.

use std::io;

use super::queue::{Chain, Outcome};
use super::submit::Tag;
use super::{Command, Worker};
use crate::uring::Io;

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

impl Worker {
    /// FLUSH: makes completed writes durable.
    pub(super) fn flush(&mut self, chain: Chain) -> io::Result<()> {
        self.flushes.push(chain);
        self.start_flush()
    }

    /// Starts a flush for all requests that wait for one, unless a flush is running.
    fn start_flush(&mut self) -> io::Result<()> {
        if !self.flushes.start() {
            return Ok(());
        }
        // If no block has become present since the map was last written, a sync of the data is
        // enough. If another thread syncs it, the flusher waits for that.
        if self.context.flusher.is_current()
            && let Some(sync) = self.context.disk.data_sync.try_begin()
        {
            return self.ring.start(Io::Sync, Tag::Sync(sync));
        }
        let mailbox = self.mailbox.clone();
        let done = move |result| mailbox.send(Command::Flushed(result));
        self.context.flusher.request(Box::new(done));
        Ok(())
    }

    /// Answers the requests whose flush has ended.
    pub(super) fn finish_flush(&mut self, result: &io::Result<()>) -> io::Result<()> {
        for chain in self.flushes.finish() {
            match result {
                Ok(()) => self.end(chain, Outcome::Ok(0)),
                Err(error) => self.finish(chain, Err(io::Error::from(error.kind())), 0),
            }
        }
        self.start_flush()
    }
}
