//! One connection: lines in, lines out.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cairn_agent::{
    Accepted, Checkpoint, Event, Failed, Follow, MAX_LINE, MAX_LISTED, Marked, Obsolete,
    PROTOCOL_VERSION, Refusal, RefusalKind, Request, Resized, SnapshotLine, Snapshots, Stable,
    Status, Wait,
};
use cairn_store::{ErrorKind, Selector, SnapshotState, now};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::CHECKPOINT_BURST;
use super::catalog_lane::NotAsked;
use super::{ControlContext, Origin};
use crate::commit::{Commit, CommitState};
use crate::grow::GrowError;
use crate::image::{Image, ObsoleteSnapshots};

/// How long it may take to receive or send one line, once it has begun.
const LINE_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest reason in the answer to an invalid line, in characters.
const MAX_REASON_CHARS: usize = 200;

/// How long a connection may be idle.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// Serves a connection until it ends or violates the protocol.
pub(super) async fn serve(
    stream: UnixStream,
    origin: Origin,
    context: &Arc<ControlContext>,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    loop {
        let Some(line) = next_line(&mut reader).await? else { return Ok(()) };
        let asked = Instant::now();
        let request = match parse(&line) {
            Ok(request) => request,
            Err(message) => {
                // After an invalid line it is unknown where the next one starts.
                return send(&mut writer, &refusal(RefusalKind::Invalid, message)).await;
            }
        };
        if origin == Origin::Guest && !request.allowed_from_guest() {
            let message =
                "a guest may ask for checkpoint, follow, status, list and obsolete only".into();
            send(&mut writer, &refusal(RefusalKind::Denied, message)).await?;
            continue;
        }
        match request {
            Request::Checkpoint(request) => match allow_checkpoint(context, origin, asked) {
                Ok(()) => {
                    let client = (&mut reader, &mut writer);
                    checkpoint(client, origin, context, &request, asked).await?;
                }
                Err(refused) => send(&mut writer, &Event::Error(refused)).await?,
            },
            Request::Follow(Follow { number }) => {
                let event = follow(&mut reader, context, origin, number).await?;
                send(&mut writer, &event).await?;
            }
            Request::Status => send(&mut writer, &Event::Status(status(context))).await?,
            Request::List => send(&mut writer, &list(context, origin).await).await?,
            Request::Obsolete(request) => {
                send(&mut writer, &obsolete(context, origin, request).await).await?;
            }
            Request::Resize => send(&mut writer, &resize(context, origin).await).await?,
            Request::Stats => send(&mut writer, &Event::Stats(context.counters.read())).await?,
        }
    }
}

/// Returns the next line, or a part of it that shows that it is too long. Returns `None` at the
/// end.
pub(crate) async fn next_line(
    reader: &mut (impl AsyncBufRead + Unpin),
) -> io::Result<Option<Vec<u8>>> {
    if timeout(IDLE_TIMEOUT, reader.fill_buf()).await??.is_empty() {
        return Ok(None);
    }
    let mut line = Vec::new();
    let mut limited = reader.take(MAX_LINE as u64 + 1);
    timeout(LINE_TIMEOUT, limited.read_until(b'\n', &mut line)).await??;
    Ok(Some(line))
}

/// Parses a line. The error is the reason why the line is not a request.
pub(crate) fn parse(line: &[u8]) -> Result<Request, String> {
    if line.len() > MAX_LINE {
        return Err(format!("a line is at most {MAX_LINE} bytes"));
    }
    // The reason may quote the line, and has to fit into a line itself.
    serde_json::from_slice(line)
        .map_err(|error| error.to_string().chars().take(MAX_REASON_CHARS).collect())
}

fn refusal(kind: RefusalKind, message: String) -> Event {
    Event::Error(Refusal { kind, message })
}

async fn send(writer: &mut (impl AsyncWriteExt + Unpin), event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    timeout(LINE_TIMEOUT, writer.write_all(&line)).await?
}

/// Checks how often a guest takes checkpoints. The operator is not limited.
fn allow_checkpoint(context: &ControlContext, origin: Origin, now: Instant) -> Result<(), Refusal> {
    if origin == Origin::Host {
        return Ok(());
    }
    let mut limit = context.guest_checkpoints.lock().expect("no code panics with this lock held");
    limit.take(now).map_err(|wait| {
        let (interval, wait) = (limit.interval().as_secs_f64(), wait.as_secs_f64());
        let message = format!(
            "a guest may take {CHECKPOINT_BURST} checkpoints at once, and then one every {interval} s; try \
             again in {wait:.1} s"
        );
        Refusal { kind: RefusalKind::Busy, message }
    })
}

async fn checkpoint(
    (reader, writer): (&mut (impl AsyncBufRead + Unpin), &mut (impl AsyncWriteExt + Unpin)),
    origin: Origin,
    context: &Arc<ControlContext>,
    request: &Checkpoint,
    asked: Instant,
) -> io::Result<()> {
    let is_from_guest = origin == Origin::Guest;
    let commit = match context.commits.checkpoint(request, is_from_guest, asked) {
        Err(refused) if is_label_free(context, origin, request, &refused).await => {
            context.commits.checkpoint(request, is_from_guest, asked)
        }
        result => result,
    };
    let commit = match commit {
        Ok(commit) => commit,
        Err(refused) => return send(writer, &Event::Error(refused)).await,
    };
    let new = &commit.new;
    let accepted = Accepted {
        snapshot: context.image.snapshot_name(new.number),
        number: new.number,
        dirty_bytes: new.dirty_bytes,
        pause_us: new.pause_us,
    };
    send(writer, &Event::Accepted(accepted)).await?;
    if request.wait == Wait::Stable {
        let event = outcome(reader, context, &commit).await?;
        send(writer, &event).await?;
    }
    Ok(())
}

/// Checks whether a label was refused although the catalog no longer has it. If so, frees the
/// label.
async fn is_label_free(
    context: &Arc<ControlContext>,
    origin: Origin,
    request: &Checkpoint,
    refused: &Refusal,
) -> bool {
    let (Some(label), RefusalKind::Conflict) = (request.label.clone(), refused.kind) else {
        return false;
    };
    let shared = context.clone();
    let freed = context.catalog.of(origin).ask(move || {
        let is_in_catalog = || match shared.image.find(Selector::Label(label.clone())) {
            Ok(found) => found.is_some_and(|one| one.state != SnapshotState::Failed),
            Err(_) => true,
        };
        shared.commits.free_label(&label, is_in_catalog)
    });
    freed.await.unwrap_or(false)
}

/// Returns the outcome of a checkpoint, whichever process accepted it.
async fn follow(
    reader: &mut (impl AsyncBufRead + Unpin),
    context: &Arc<ControlContext>,
    origin: Origin,
    number: u64,
) -> io::Result<Event> {
    // In this order: a checkpoint that leaves the queue in between is in the catalog or in the list
    // of unrecorded failures.
    match context.commits.find(number) {
        Some(commit) => outcome(reader, context, &commit).await,
        None => Ok(recorded_outcome(context, origin, number).await),
    }
}

/// Returns the outcome of a checkpoint that is not in the queue.
async fn recorded_outcome(context: &Arc<ControlContext>, origin: Origin, number: u64) -> Event {
    let name = context.image.snapshot_name(number);
    let failed = |reason| Event::Failed(Failed { snapshot: name.clone(), number, reason });
    if let Some(reason) = context.commits.unrecorded_failure(number) {
        return failed(reason);
    }
    let find = move |image: &Image| image.find(Selector::Number(number));
    let snapshot = match ask_catalog(context, origin, find).await {
        Ok(found) => found,
        Err(refused) => return refused,
    };
    let Some(snapshot) = snapshot else {
        return match number < context.commits.unused_numbers().start {
            true => failed(
                "the snapshot was lost before it was in the catalog, or it was removed".into(),
            ),
            false => refusal(RefusalKind::Invalid, format!("there is no snapshot {name}")),
        };
    };
    match snapshot.state {
        SnapshotState::Stable => Event::Stable(Stable {
            snapshot: name,
            number,
            dirty_bytes: snapshot.dirty_bytes,
            stored_bytes: snapshot.stored_bytes,
            elapsed_ms: now().saturating_sub(snapshot.time) * 1000,
        }),
        SnapshotState::Failed => {
            failed(snapshot.reason.unwrap_or_else(|| "the reason is not known".into()))
        }
        SnapshotState::Removing => failed("the snapshot is being removed".into()),
        SnapshotState::Available => {
            let message =
                format!("{name} can be read, but is not yet stored with its full redundancy");
            refusal(RefusalKind::Unavailable, message)
        }
        SnapshotState::Pending => {
            let message = format!("{name} is not a checkpoint of this disk, but of another mirror");
            refusal(RefusalKind::Invalid, message)
        }
    }
}

/// Asks the catalog. Returns the answer to send if the catalog is unavailable, or if a guest asks too
/// often or too many of its queries wait.
async fn ask_catalog<T: Send + 'static>(
    context: &Arc<ControlContext>,
    origin: Origin,
    ask: impl FnOnce(&Image) -> cairn_store::Result<T> + Send + 'static,
) -> Result<T, Event> {
    let shared = context.clone();
    match context.catalog.of(origin).ask(move || ask(&shared.image)).await {
        Ok(asked) => asked.map_err(|error| refusal(RefusalKind::Unavailable, error.to_string())),
        Err(error @ (NotAsked::Full | NotAsked::TooOften(_))) => {
            Err(refusal(RefusalKind::Busy, error.to_string()))
        }
        Err(error @ NotAsked::Ended) => Err(refusal(RefusalKind::Unavailable, error.to_string())),
    }
}

/// Marks snapshots of this image that were taken from inside the guest as obsolete.
async fn obsolete(context: &Arc<ControlContext>, origin: Origin, request: Obsolete) -> Event {
    if origin == Origin::Guest && !context.guest_may_remove {
        let message = "this guest may not give up snapshots; the host allows it with cairn-blk \
                       --guest-may-remove"
            .into();
        return refusal(RefusalKind::Denied, message);
    }
    if context.disk.read_only {
        let message =
            "this disk is read-only, so no snapshot was taken from it; ask the guest that \
                       writes the image"
                .into();
        return refusal(RefusalKind::Denied, message);
    }
    let which = match request {
        Obsolete { number: Some(number), keep_last: None } => ObsoleteSnapshots::One(number),
        Obsolete { number: None, keep_last: Some(keep @ 1..) } => ObsoleteSnapshots::AllBut(keep),
        _ => {
            let message = "state either 'number', or 'keep_last' of 1 or more".into();
            return refusal(RefusalKind::Invalid, message);
        }
    };
    let mark = move |image: &Image| Ok(image.mark_obsolete(which, MAX_LISTED));
    match ask_catalog(context, origin, mark).await {
        Err(refused) => refused,
        Ok(Ok(snapshots)) => Event::Marked(Marked { snapshots }),
        Ok(Err(error)) => {
            let kind = match error.kind() {
                ErrorKind::Invalid => RefusalKind::Denied,
                ErrorKind::NotFound | ErrorKind::Conflict => RefusalKind::Invalid,
                ErrorKind::Corrupt | ErrorKind::Unavailable => RefusalKind::Unavailable,
            };
            refusal(kind, error.to_string())
        }
    }
}

/// Grows the disk to the size of its image.
async fn resize(context: &Arc<ControlContext>, origin: Origin) -> Event {
    let shared = context.clone();
    let grown = context.catalog.of(origin).ask(move || shared.grower.follow_image()).await;
    match grown {
        Ok(Ok(size)) => Event::Resized(Resized { size }),
        Ok(Err(error @ GrowError::ReadOnly)) => refusal(RefusalKind::Denied, error.to_string()),
        Ok(Err(error @ GrowError::Stopping)) => refusal(RefusalKind::Busy, error.to_string()),
        Ok(Err(error)) => refusal(RefusalKind::Unavailable, error.to_string()),
        Err(error) => refusal(RefusalKind::Unavailable, error.to_string()),
    }
}

/// Waits for the end of a checkpoint. Fails if the client leaves before, because the wait may be
/// long and the connection would stay in use.
async fn outcome(
    reader: &mut (impl AsyncBufRead + Unpin),
    context: &ControlContext,
    commit: &Commit,
) -> io::Result<Event> {
    let mut state = commit.watch();
    let ended = tokio::select! {
        biased;
        ended = state.wait_for(|state| *state != CommitState::Pending) => {
            ended.map(|state| state.clone()).unwrap_or(CommitState::Pending)
        }
        // The client closed the connection, or sends before it has the answer. The latter violates
        // the protocol, and would hide the end of the connection.
        read = reader.fill_buf() => {
            read?;
            return Err(io::Error::other("the client did not wait for the answer"));
        }
    };
    let (snapshot, number) = (context.image.snapshot_name(commit.new.number), commit.new.number);
    Ok(match ended {
        CommitState::Stable { stored_bytes, elapsed } => Event::Stable(Stable {
            snapshot,
            number,
            dirty_bytes: commit.new.dirty_bytes,
            stored_bytes,
            elapsed_ms: elapsed.as_millis() as u64,
        }),
        CommitState::Failed(reason) => Event::Failed(Failed { snapshot, number, reason }),
        CommitState::Pending => refusal(
            RefusalKind::Unavailable,
            format!("the outcome of {snapshot} is not known here"),
        ),
    })
}

fn status(context: &ControlContext) -> Status {
    let mirror = &context.disk.mirror;
    let layout = mirror.layout();
    let queues = context.counters.queues.iter().enumerate();
    let sync_failure = context.disk.data_sync.failure().map(str::to_owned);
    let checkpoint_error = context.image.poison_reason().or(sync_failure);
    Status {
        protocol: PROTOCOL_VERSION,
        image: context.image.name().to_string(),
        parent: context.image.parent_name(),
        size: layout.size(),
        chunk_size: layout.chunk_size() as u32,
        read_only: context.disk.read_only,
        connected: context.guest.is_connected(),
        dirty_bytes: mirror.epoch_view().dirty().len() * layout.chunk_size() as u64,
        present_bytes: mirror.presence().local_bytes(),
        pending: context.commits.pending(),
        checkpoint_error,
        last_failed: context.commits.last_failed(),
        queues: queues.map(|(number, queue)| queue.read(number)).collect(),
    }
}

/// Lists the snapshots of the image. A checkpoint is listed as soon as it is accepted, even if the
/// catalog learns of it a little later.
async fn list(context: &Arc<ControlContext>, origin: Origin) -> Event {
    let accepted = context.commits.accepted();
    let ask = |image: &Image| image.last_snapshots(MAX_LISTED);
    let (snapshots, total) = match ask_catalog(context, origin, ask).await {
        Ok(listed) => listed,
        Err(refused) => return refused,
    };
    let older = total - snapshots.len() as u64;
    let last = snapshots.last().map_or(0, |snapshot| snapshot.number);
    let mut lines: Vec<SnapshotLine> = snapshots
        .into_iter()
        .map(|snapshot| SnapshotLine {
            snapshot: snapshot.name().to_string(),
            state: snapshot.state.to_string(),
            time: snapshot.time,
            label: snapshot.labels.into_iter().next(),
        })
        .collect();
    lines.extend(accepted.into_iter().filter(|new| new.number > last).map(|new| SnapshotLine {
        snapshot: context.image.snapshot_name(new.number),
        state: SnapshotState::Pending.to_string(),
        time: new.time,
        label: new.label,
    }));
    let omitted = lines.len().saturating_sub(MAX_LISTED);
    let snapshots = lines.split_off(omitted);
    Event::Snapshots(Snapshots { snapshots, omitted: older + omitted as u64 })
}

#[cfg(test)]
mod tests {
    use cairn_agent::{MAX_LINE, RefusalKind, Request};

    use super::{next_line, parse, refusal};

    #[test]
    fn the_refusal_of_a_long_request_fits_into_a_line() {
        let unknown = format!(r#"{{"op":"{}"}}"#, "x".repeat(MAX_LINE - 20));
        // Each of these becomes six characters in the reason.
        let odd = format!(r#""{}""#, "\u{80}".repeat(MAX_LINE / 2 - 10));
        for line in [unknown, odd] {
            assert!(line.len() <= MAX_LINE);
            let why = parse(line.as_bytes()).unwrap_err();
            let answer = serde_json::to_vec(&refusal(RefusalKind::Invalid, why)).unwrap();
            assert!(answer.len() < MAX_LINE, "{}", answer.len());
        }
    }

    #[tokio::test]
    async fn a_line_is_read_up_to_its_end_or_until_it_is_too_long() {
        let mut status = br#"{"op":"status"}"#.to_vec();
        status.resize(MAX_LINE - 1, b' ');
        for (blanks, fits) in [(0, true), (1, false)] {
            let said = [&vec![b' '; blanks], &status[..], b"\n{}"].concat();
            let mut rest = &said[..];
            let line = next_line(&mut rest).await.unwrap().unwrap();
            assert_eq!(parse(&line).ok(), fits.then_some(Request::Status));
            assert_eq!(rest, b"{}");
        }
    }
}
