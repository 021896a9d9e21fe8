//! `diff`: the ranges in which two snapshots differ.

use cairn_store::{ChangedRange, RangeContent, Repository, Snapshot, SnapshotRef};
use serde_json::json;

use crate::args::Style;
use crate::failure::{Doing, Outcome};
use crate::output::{Align, Listing, count, print};

pub(crate) fn diff(
    repository: &Repository,
    from: &SnapshotRef,
    to: &SnapshotRef,
    style: Style,
) -> Outcome {
    let doing = || format!("comparing {from} with {to}");
    let find = |name: &SnapshotRef| {
        let snapshot = repository.catalog().resolve(name).doing(doing)?;
        snapshot.require_content().doing(doing)?;
        let reader = repository.begin_reading(&snapshot, "a comparison").doing(doing)?;
        Ok((snapshot, reader))
    };
    let (first, _first_reader) = find(from)?;
    let (second, _second_reader) = find(to)?;
    let heading = [("OFFSET", Align::Right), ("LENGTH", Align::Right), ("CONTENT", Align::Left)];
    let mut listing = Listing::new(style, &heading);
    if style.json {
        let mut head = json!({
            "from": first.name().to_string(),
            "to": second.name().to_string(),
            "from_size": first.geometry.size(),
            "to_size": second.geometry.size(),
            "chunk_size": first.geometry.chunk_size(),
        })
        .to_string();
        head.pop();
        listing = listing.within(format!("{head},\"ranges\":"));
    }
    let mut total = Total::default();
    let each = |range: ChangedRange| {
        total.add(&range);
        let (offset, length) = (range.start, range.end - range.start);
        let content = range.content.as_str();
        listing.add(
            || json!({ "offset": offset, "length": length, "content": content }),
            || [offset.to_string(), length.to_string(), content.into()],
        );
        Ok(())
    };
    repository.changed_ranges(&first, &second, each).doing(doing)?;
    if style.json {
        let Total { ranges, data, zero, gone } = total;
        let mut tail = json!({
            "range_count": ranges,
            "data_bytes": data,
            "zero_bytes": zero,
            "gone_bytes": gone,
        })
        .to_string();
        tail.remove(0);
        return listing.end_with(&format!(",{tail}"));
    }
    listing.end()?;
    print(&total.text(&first, &second, style))
}

/// The ranges and their bytes.
#[derive(Default)]
struct Total {
    ranges: u64,
    data: u64,
    zero: u64,
    gone: u64,
}

impl Total {
    fn add(&mut self, range: &ChangedRange) {
        self.ranges += 1;
        let bytes = match range.content {
            RangeContent::Data => &mut self.data,
            RangeContent::Zero => &mut self.zero,
            RangeContent::Gone => &mut self.gone,
        };
        *bytes += range.end - range.start;
    }

    fn text(&self, first: &Snapshot, second: &Snapshot, style: Style) -> String {
        let Total { ranges, data, zero, gone } = *self;
        let (one, other) = (first.name(), second.name());
        if ranges == 0 {
            return format!("{one} and {other} are equal\n");
        }
        let (data, zero) = (style.size(data), style.size(zero));
        let gone = match gone {
            0 => String::new(),
            gone => format!(", {} gone", style.size(gone)),
        };
        format!("{one} to {other}: {}, {data} data, {zero} zero{gone}\n", count(ranges, "range"))
    }
}
