//! Recovers the epochs that a killed process left behind.

use std::io;
use std::sync::Arc;

use cairn_store::SnapshotState;

use super::layer::Layer;
use super::record::EpochRecord;
use crate::mirror::bits::DirtySet;
use crate::mirror::cow::CowSpace;
use crate::mirror::files::layer_table::LayerDir;
use crate::mirror::layout::Layout;

/// The epochs of a mirror, as an earlier process left them.
pub(crate) struct Recovered {
    pub(crate) current: EpochRecord,
    /// The layers that are not published, oldest first.
    pub(crate) layers: Vec<Arc<Layer>>,
    /// Those of the layers whose checkpoint can still become stable.
    pub(crate) resumed: Vec<Arc<Layer>>,
}

/// Recovers the epochs of `records`, the last of which is the current epoch. `state_of` returns the
/// state that a snapshot has in the catalog.
pub(crate) fn recover(
    mut records: Vec<EpochRecord>,
    layer_dir: &Arc<LayerDir>,
    layout: &Layout,
    space: &CowSpace,
    state_of: impl Fn(u64) -> Option<SnapshotState>,
) -> io::Result<Recovered> {
    let current = records.pop().expect("there is always a current epoch");
    let (accepted, others): (Vec<_>, Vec<_>) =
        records.into_iter().partition(|record| record.accepted().is_some());
    let join = |dirty: &DirtySet| dirty.iter().for_each(|chunk| current.chunks.schedule(chunk));
    // These were frozen for a checkpoint that was never answered, so there is no such checkpoint.
    for record in others {
        join(record.chunks.dirty());
        record.remove();
    }
    // As many as fit into the copy-on-write memory.
    let owned: Vec<_> = space.memory.owned().collect();
    let recover_layer = |record| Arc::new(Layer::recover(record, layer_dir, &owned, layout, space));
    let mut layers: Vec<Arc<Layer>> = accepted.into_iter().map(recover_layer).collect();
    let state = |layer: &Layer| layer.accepted().and_then(|new| state_of(new.number));
    // A published layer has absorbed everything before it.
    let published =
        layers.iter().rposition(|layer| state(layer).is_some_and(SnapshotState::has_content));
    layers.drain(..published.map_or(0, |last| last + 1)).for_each(|layer| layer.close());
    for layer in &layers {
        // The process may have ended after the catalog learned of the failure.
        if state(layer) == Some(SnapshotState::Failed) {
            layer.abandon();
        }
        // What was lost has to be in the next checkpoint.
        if layer.failure().is_some() {
            join(layer.dirty());
        }
    }
    let resumed: Vec<_> =
        layers.iter().filter(|layer| !layer.state().is_abandoned()).cloned().collect();
    // An abandoned layer is absorbed by a later one. Without a later one, its changes join the
    // current epoch.
    let last = resumed.last().map_or(0, |layer| layer.epoch.0);
    let (layers, failed): (Vec<_>, Vec<_>) =
        layers.into_iter().partition(|layer| layer.epoch.0 <= last);
    for layer in failed {
        join(layer.dirty());
        layer.close();
    }
    // Those of epochs that ended while the process was killed.
    layer_dir.retain(|epoch| layers.iter().any(|layer| layer.epoch == epoch))?;
    Ok(Recovered { current, layers, resumed })
}
