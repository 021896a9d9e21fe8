//! Takes up the epochs that a killed process left behind.

use std::io;
use std::sync::Arc;

use cairn_store::SnapshotState;

use crate::mirror::CowSpace;
use crate::mirror::bits::DirtySet;
use crate::mirror::epoch::layer::Layer;
use crate::mirror::epoch::record::EpochRecord;
use crate::mirror::files::journal::Journal;
use crate::mirror::layout::Layout;

/// The epochs of a mirror, as the process before this one left them.
pub(crate) struct Recovered {
    pub(crate) current: EpochRecord,
    /// Frozen epochs that are not published, oldest first.
    pub(crate) layers: Vec<Arc<Layer>>,
    /// Those of them whose checkpoint can still become stable.
    pub(crate) resumed: Vec<Arc<Layer>>,
}

/// Takes them up. `states` has the current epoch's last; `state_of` tells what the catalog has of a
/// snapshot.
pub(crate) fn recover(
    mut states: Vec<EpochRecord>,
    journal: &Arc<Journal>,
    layout: &Layout,
    cow_space: &CowSpace,
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
        let places = (&cow_space.memory, &cow_space.spill);
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
        // EpochFiles to come must not find records of others.
        journal.clear()?;
    }
    Ok(Recovered { current, layers, resumed })
}
