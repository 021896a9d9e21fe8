//! Takes up the epochs that a killed process left behind.

use std::io;
use std::sync::Arc;

use cairn_store::SnapshotState;

use super::Room;
use super::bits::DirtySet;
use super::epoch::EpochState;
use super::journal::Journal;
use super::layer::Layer;
use super::layout::Layout;

/// The epochs of a mirror, as the process before this one left them.
pub(crate) struct Recovered {
    pub(crate) current: EpochState,
    /// Frozen epochs that are not published, oldest first.
    pub(crate) layers: Vec<Arc<Layer>>,
    /// Those of them whose checkpoint can still become stable.
    pub(crate) resumed: Vec<Arc<Layer>>,
}

/// Takes them up. `states` has the current epoch's last; `state_of` tells what the catalog has of a
/// snapshot.
pub(crate) fn recover(
    mut states: Vec<EpochState>,
    journal: &Arc<Journal>,
    layout: &Layout,
    room: &Room,
    state_of: impl Fn(u64) -> Option<SnapshotState>,
) -> io::Result<Recovered> {
    let current = states.pop().expect("there is always a current epoch");
    let (accepted, others): (Vec<_>, Vec<_>) =
        states.into_iter().partition(|state| state.accepted().is_some());
    let join = |dirty: &DirtySet| dirty.iter().for_each(|chunk| current.dirty.insert(chunk));
    // Frozen by a checkpoint that was not answered: it did not happen.
    for state in others {
        join(&state.dirty);
        state.remove();
    }
    let records = journal.read()?;
    let take_up = |state| {
        let places = (&room.shelf, &room.spill);
        Arc::new(Layer::recover(state, journal, records.as_deref(), layout, places))
    };
    let mut layers: Vec<Arc<Layer>> = accepted.into_iter().map(take_up).collect();
    let state = |layer: &Layer| layer.accepted().and_then(|new| state_of(new.number));
    // Published, and with it everything before it.
    let published =
        layers.iter().rposition(|layer| state(layer).is_some_and(SnapshotState::has_content));
    layers.drain(..published.map_or(0, |last| last + 1)).for_each(|layer| layer.close());
    // What is lost has to be in the next checkpoint.
    for layer in layers.iter().filter(|layer| layer.failure().is_some()) {
        join(layer.dirty());
    }
    let may_succeed =
        |layer: &&Arc<Layer>| !layer.has_ended() && state(layer) != Some(SnapshotState::Failed);
    let resumed: Vec<_> = layers.iter().filter(may_succeed).cloned().collect();
    // One that has failed is absorbed by a later one, or else by the next.
    let last = resumed.last().map_or(0, |layer| layer.epoch.0);
    let (layers, failed): (Vec<_>, Vec<_>) =
        layers.into_iter().partition(|layer| layer.epoch.0 <= last);
    for layer in failed {
        join(layer.dirty());
        layer.close();
    }
    if layers.is_empty() {
        // Epochs to come must not find records of others.
        journal.clear()?;
    }
    Ok(Recovered { current, layers, resumed })
}
