//! `ls`: lists images and snapshots, filtered, sorted and in pages.
//!
//! A listing in the order of names is printed while the catalog is read. Any other order needs all of
//! it in memory, or with a limit, twice as many entries as the limit.

use std::cmp::Ordering;

use cairn_store::metadata::check_key;
use cairn_store::{Image, Repository, Scope, Selector, Snapshot, SnapshotRef, SnapshotState, now};
use serde_json::{Value, json};

use crate::args::{Ls, SortBy, Style};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::images::{image_json, joined, metadata, snapshot_json};
use crate::output::{Align, Listing, or_dash};
use crate::time::utc;

pub(crate) fn ls(repository: &Repository, args: &Ls, style: Style) -> Outcome {
    let scope = args.scope.clone().unwrap_or(Scope::All);
    let filter = Filter::new(args)?;
    let order = Order::new(args)?;
    match &scope {
        Scope::Image(_) => snapshots(repository, &scope, &filter, order, args, style),
        _ if args.snapshots || filter.is_set() => {
            snapshots(repository, &scope, &filter, order, args, style)
        }
        _ => images(repository, &scope, order, args, style),
    }
}

/// A snapshot, and when it was last verified.
type Verified = (Snapshot, Option<u64>);

fn usage(why: &str) -> Failure {
    Failure::new(Exit::Usage, "listing", why)
}

/// Fails if a folder has no image.
fn require_any(scope: &Scope, is_any: bool) -> Outcome {
    match scope {
        Scope::Folder(_) if !is_any => {
            let why = format!("no image is in '{scope}'; `cairn ls` lists all images");
            Err(Failure::new(Exit::NotFound, format!("listing '{scope}'"), why))
        }
        _ => Ok(()),
    }
}

fn images(
    repository: &Repository,
    scope: &Scope,
    order: Order,
    args: &Ls,
    style: Style,
) -> Outcome {
    let compare: fn(&Image, &Image) -> Ordering = match order.by {
        SortBy::Name => |one, other| one.name.cmp(&other.name),
        SortBy::Time => |one, other| (one.created, &one.name).cmp(&(other.created, &other.name)),
        SortBy::Changed | SortBy::Stored => {
            return Err(usage(
                "this lists images, and only snapshots have such a size; add --snapshots to list \
                 snapshots",
            ));
        }
    };
    let after = match &args.after {
        None => None,
        Some(SnapshotRef { image, selector: Selector::Newest }) => Some(image),
        Some(_) => return Err(usage("this lists images, so --after names an image")),
    };
    let heading = [
        ("IMAGE", Align::Left),
        ("SIZE", Align::Right),
        ("CHUNK", Align::Right),
        ("SNAPSHOTS", Align::Right),
        ("NEWEST", Align::Right),
        ("CREATED", Align::Left),
        ("ORIGIN", Align::Left),
    ];
    let mut page = Page::new(order, compare, Listing::new(style, &heading), |image: &Image| {
        let row = [
            image.name.to_string(),
            style.size(image.geometry.size()),
            style.size(image.geometry.chunk_size().into()),
            image.snapshots.to_string(),
            or_dash(image.newest),
            utc(image.created),
            or_dash(image.origin.as_ref()),
        ];
        (image_json(image), row)
    });
    let mut is_any = false;
    let each = |image: Image| {
        let is_inside = scope.contains(&image.name);
        is_any |= is_inside;
        if is_inside && after.is_none_or(|after| image.name > *after) {
            return Ok(page.add(image));
        }
        Ok(true)
    };
    repository.catalog().each_image_while(each).doing(|| "listing the images".into())?;
    require_any(scope, is_any)?;
    page.end()
}

fn snapshots(
    repository: &Repository,
    scope: &Scope,
    filter: &Filter<'_>,
    order: Order,
    args: &Ls,
    style: Style,
) -> Outcome {
    let key = |one: &Snapshot| match order.by {
        SortBy::Name => 0,
        SortBy::Time => one.time,
        SortBy::Changed => one.dirty_bytes,
        SortBy::Stored => one.stored_bytes,
    };
    let compare = |(one, _): &Verified, (other, _): &Verified| {
        (key(one), &one.image, one.number).cmp(&(key(other), &other.image, other.number))
    };
    let after = match &args.after {
        None => None,
        Some(SnapshotRef { image, selector: Selector::Number(number) }) => Some((image, *number)),
        Some(SnapshotRef { image, selector: Selector::Newest })
            if !matches!(scope, Scope::Image(_)) =>
        {
            Some((image, u64::MAX))
        }
        Some(_) => return Err(usage("this lists snapshots, so --after is IMAGE@NUMBER")),
    };
    let heading = [
        ("SNAPSHOT", Align::Left),
        ("STATE", Align::Left),
        ("TIME", Align::Left),
        ("CHANGED", Align::Right),
        ("STORED", Align::Right),
        ("PAUSE", Align::Right),
        ("CONSISTENCY", Align::Left),
        ("VERIFIED", Align::Left),
        ("LABELS", Align::Left),
        ("NOTES", Align::Left),
    ];
    let listing = Listing::new(style, &heading);
    let mut page = Page::new(order, compare, listing, |(one, verified): &Verified| {
        let row = [
            one.name().to_string(),
            one.state.to_string(),
            utc(one.time),
            style.size(one.dirty_bytes),
            style.size(one.stored_bytes),
            format!("{} us", one.pause_us),
            one.consistency.to_string(),
            or_dash(verified.map(utc)),
            or_dash(joined(&one.labels)),
            or_dash(joined(&notes(one))),
        ];
        let mut json = snapshot_json(one);
        json["verified"] = json!(verified);
        (json, row)
    });
    let doing = || format!("listing the snapshots of '{scope}'");
    let catalog = repository.catalog();
    let mut names = Vec::new();
    match scope {
        Scope::Image(image) => names.push(image.clone()),
        _ => catalog
            .each_image(|image| {
                if scope.contains(&image.name) {
                    names.push(image.name);
                }
                Ok(())
            })
            .doing(doing)?,
    }
    require_any(scope, !names.is_empty())?;
    for name in names {
        if after.is_some_and(|(after, _)| name < *after) || page.is_full() {
            continue;
        }
        let first = after.filter(|(after, _)| name == **after).map_or(0, |(_, number)| number);
        let listed = catalog.verified(&name).and_then(|times| {
            catalog.each_snapshot_after(&name, first, |one: Snapshot| {
                let verified = times.of(one.number).filter(|_| one.state.has_content());
                Ok(!filter.matches(&one) || page.add((one, verified)))
            })
        });
        match listed {
            // It was removed meanwhile.
            Err(error)
                if error.kind() == cairn_store::ErrorKind::NotFound
                    && !matches!(scope, Scope::Image(_)) => {}
            result => result.doing(doing)?,
        }
    }
    page.end()
}

/// What else there is to say about a snapshot.
fn notes(one: &Snapshot) -> Vec<String> {
    let pinned = one.is_pinned.then(|| "pinned".to_owned());
    let obsolete = one.is_obsolete.then(|| "obsolete".to_owned());
    pinned.into_iter().chain(obsolete).chain(metadata(one)).collect()
}

/// The order of a listing, and how much of it is wanted.
#[derive(Clone, Copy)]
struct Order {
    by: SortBy,
    is_reverse: bool,
    limit: usize,
}

impl Order {
    fn new(args: &Ls) -> Outcome<Order> {
        let Ls { sort: by, reverse: is_reverse, .. } = *args;
        if args.after.is_some() && (by != SortBy::Name || is_reverse) {
            return Err(usage(
                "--after continues the order of names, without --sort and --reverse",
            ));
        }
        let limit = args.limit.map_or(usize::MAX, |limit| limit as usize);
        Ok(Order { by, is_reverse, limit })
    }

    /// Whether entries arrive in this order.
    fn is_natural(self) -> bool {
        self.by == SortBy::Name && !self.is_reverse
    }
}

/// The entries that are printed.
struct Page<T, C, R> {
    order: Order,
    compare: C,
    listing: Listing,
    row: R,
    /// How many were printed.
    printed: usize,
    /// Entries that are to be sorted.
    held: Vec<T>,
}

impl<T, C, R, const N: usize> Page<T, C, R>
where
    C: Fn(&T, &T) -> Ordering,
    R: Fn(&T) -> (Value, [String; N]),
{
    fn new(order: Order, compare: C, listing: Listing, row: R) -> Page<T, C, R> {
        Page { order, compare, listing, row, printed: 0, held: Vec::new() }
    }

    /// Whether no further entry is printed, whatever it is.
    fn is_full(&self) -> bool {
        self.printed >= self.order.limit
    }

    /// Adds an entry. Returns whether more are wanted.
    fn add(&mut self, one: T) -> bool {
        if self.order.is_natural() {
            self.print(&one);
            return !self.is_full();
        }
        self.held.push(one);
        if self.held.len() >= self.order.limit.saturating_mul(2) {
            self.sort();
        }
        true
    }

    /// Sorts what is held, and forgets what is not printed.
    fn sort(&mut self) {
        let Page { order, compare, held, .. } = self;
        held.sort_by(|one, other| match order.is_reverse {
            false => compare(one, other),
            true => compare(other, one),
        });
        held.truncate(order.limit);
    }

    fn print(&mut self, one: &T) {
        self.printed += 1;
        let (json, row) = (self.row)(one);
        self.listing.add(|| json, || row);
    }

    fn end(mut self) -> Outcome {
        self.sort();
        for one in std::mem::take(&mut self.held) {
            self.print(&one);
        }
        self.listing.end()
    }
}

/// Which snapshots are listed.
struct Filter<'a> {
    args: &'a Ls,
    /// Keys of the metadata, each with the value that it must have, if any.
    meta: Vec<(&'a str, Option<&'a str>)>,
    now: u64,
}

impl<'a> Filter<'a> {
    fn new(args: &'a Ls) -> Outcome<Filter<'a>> {
        let pair = |text: &'a String| match text.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (text.as_str(), None),
        };
        let meta: Vec<_> = args.meta.iter().map(pair).collect();
        meta.iter().try_for_each(|(key, _)| check_key(key)).doing(|| "listing".into())?;
        Ok(Filter { args, meta, now: now() })
    }

    fn is_set(&self) -> bool {
        let Ls { label, state, newer_than, older_than, pinned, obsolete, .. } = self.args;
        label.is_some()
            || state.is_some()
            || newer_than.or(*older_than).is_some()
            || *pinned
            || *obsolete
            || !self.meta.is_empty()
    }

    fn matches(&self, one: &Snapshot) -> bool {
        let args = self.args;
        let age = self.now.saturating_sub(one.time);
        let has_state = |state: SnapshotState| one.state == state;
        let has_label =
            |pattern: &String| one.labels.iter().any(|label| is_like(label, pattern.as_bytes()));
        let has_meta = |(key, wanted): &(&str, Option<&str>)| {
            let found = one.metadata.get(key);
            found.is_some_and(|value| wanted.is_none_or(|wanted| value == wanted))
        };
        args.label.as_ref().is_none_or(has_label)
            && args.state.is_none_or(has_state)
            && args.newer_than.is_none_or(|limit| age < limit)
            && args.older_than.is_none_or(|limit| age >= limit)
            && self.meta.iter().all(has_meta)
            && (!args.pinned || one.is_pinned)
            && (!args.obsolete || one.is_obsolete)
    }
}

/// Whether a text is like a pattern, in which `*` stands for any characters and `?` for one.
fn is_like(text: &str, pattern: &[u8]) -> bool {
    let text = text.as_bytes();
    let (mut at, mut next) = (0, 0);
    // Where the last `*` is, and how much of the text it stands for at least.
    let mut star: Option<(usize, usize)> = None;
    while at < text.len() {
        match pattern.get(next) {
            Some(b'*') => {
                star = Some((next, at));
                next += 1;
            }
            Some(&byte) if byte == b'?' || byte == text[at] => {
                next += 1;
                at += 1;
            }
            _ => match star {
                Some((place, taken)) => {
                    star = Some((place, taken + 1));
                    (next, at) = (place + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[next..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::is_like;

    #[test]
    fn a_pattern_has_wildcards() {
        for (text, pattern) in [
            ("a", "a"),
            ("a", "*"),
            ("release-1.2", "release-*"),
            ("release-1.2", "*-?.?"),
            ("abcabd", "*abd"),
            ("aaab", "a*a*b"),
            ("ab", "a*b*"),
        ] {
            assert!(is_like(text, pattern.as_bytes()), "{text} {pattern}");
        }
        for (text, pattern) in
            [("a", ""), ("a", "b"), ("ab", "a"), ("ab", "a?b"), ("abcabe", "*abd"), ("a", "a?")]
        {
            assert!(!is_like(text, pattern.as_bytes()), "{text} {pattern}");
        }
        // Many stars cost no more than a product of the lengths.
        assert!(!is_like(&"a".repeat(64), "*a".repeat(500).as_bytes()));
    }
}
