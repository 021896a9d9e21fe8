//! Closes files of the hypervisor on a thread of their own.
//!
//! The end of a file can take as long as the hypervisor likes: a socket that lingers waits until its
//! peer has read what was sent. No worker waits for that, and no connection: its rings have to stop
//! before another hypervisor can run them. Event descriptors end at once, so they need no thread.

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, SyncSender};
use std::thread;

/// The most files that wait to be closed. Further ones are closed by their connection.
const MAX_WAITING: usize = 64;

/// Hands files to the thread that closes them. The thread ends with the last clone.
#[derive(Clone)]
pub(super) struct FileCloser(SyncSender<File>);

impl FileCloser {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<FileCloser> {
        let (sender, files) = mpsc::sync_channel(MAX_WAITING);
        let close = move || files.into_iter().for_each(drop);
        // Nobody waits for the end of the thread.
        thread::Builder::new().name("vhost-close".into()).spawn(close)?;
        Ok(FileCloser(sender))
    }

    /// Closes a file.
    pub(super) fn close(&self, file: File) {
        // If there is no room, the file comes back with the error and is closed here.
        let _ = self.0.try_send(file);
    }
}
