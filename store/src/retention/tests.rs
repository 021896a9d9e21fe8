//! Retention, as examples and as properties of any image and policy.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::{
    Candidate, Kept, Period, Removed, RetentionPolicy, Rule, Unit, Verdict, last_stable, retention,
};
use crate::snapshot::SnapshotState;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// 2026-03-01 12:00 UTC, a Sunday.
const NOON: u64 = 1_772_366_400;

fn stable(number: u64, time: u64) -> Candidate {
    Candidate {
        number,
        time,
        state: SnapshotState::Stable,
        is_pinned: false,
        is_obsolete: false,
        protection: None,
    }
}

/// Stable snapshots at these times, numbered from 1.
fn at(times: &[u64]) -> Vec<Candidate> {
    (1..).zip(times).map(|(number, time)| stable(number, *time)).collect()
}

fn policy() -> RetentionPolicy {
    RetentionPolicy::default()
}

/// The numbers of the snapshots that stay.
fn kept(candidates: &[Candidate], policy: &RetentionPolicy, now: u64) -> Vec<u64> {
    numbers(candidates, &retention(candidates, Some(policy), now))
}

fn numbers(candidates: &[Candidate], verdicts: &[Verdict]) -> Vec<u64> {
    let all = candidates.iter().zip(verdicts);
    all.filter(|(_, verdict)| !verdict.is_removal()).map(|(one, _)| one.number).collect()
}

#[test]
fn the_last_ones_are_those_with_the_highest_numbers_whatever_the_clock_said() {
    // The clock stepped back by a year before the last two.
    let all = at(&[NOON, NOON + HOUR, NOON + 2 * HOUR, NOON - 365 * DAY, NOON - 364 * DAY]);
    assert_eq!(kept(&all, &RetentionPolicy { last: Some(2), ..policy() }, NOON), [4, 5]);
}

#[test]
fn each_rule_counts_further_periods_than_those_that_an_earlier_rule_has_covered() {
    // Every six hours for ten days.
    let times: Vec<u64> = (0..40).map(|i| NOON - 39 * 6 * HOUR + i * 6 * HOUR).collect();
    let all = at(&times);
    let rules = RetentionPolicy { last: Some(3), daily: Some(2), weekly: Some(1), ..policy() };
    let verdicts = retention(&all, Some(&rules), NOON);
    // The last three are of 03-01 (12h, 6h, 0h), so the days are 02-28 and 02-27, and the week is
    // the one before the week of these days, which ends on Sunday 02-22.
    let reason = |number: usize| verdicts[number - 1].to_string();
    assert_eq!(numbers(&all, &verdicts), [13, 33, 37, 38, 39, 40]);
    assert_eq!(reason(40), "keep-last");
    assert_eq!(reason(37), "keep-daily (2026-02-28)");
    assert_eq!(reason(33), "keep-daily (2026-02-27)");
    assert_eq!(reason(13), "keep-weekly (2026-W08)");
    assert_eq!(reason(36), "no rule keeps it");
}

#[test]
fn a_snapshot_that_a_rule_passed_over_for_a_newer_one_is_not_selected_by_a_later_rule() {
    // 2026-01-30 and 31 (Friday and Saturday) and 02-01 (Sunday) are in one week.
    let january = 1_769_774_400;
    let all = at(&[january - 10 * DAY, january, january + DAY, january + 2 * DAY]);
    let rules = RetentionPolicy { weekly: Some(1), monthly: Some(2), ..policy() };
    // January is represented by the snapshot of the 20th: those of the 30th and 31st lost their
    // week to the one of February 1st.
    assert_eq!(kept(&all, &rules, NOON), [1, 4]);
}

#[test]
fn the_period_of_a_leap_day_and_of_the_end_of_a_year_counts_like_any_other() {
    // 2024-02-28, 02-29, 03-01 at noon.
    let leap = 1_709_208_000;
    let all = at(&[leap - DAY, leap, leap + DAY]);
    assert_eq!(kept(&all, &RetentionPolicy { daily: Some(3), ..policy() }, NOON), [1, 2, 3]);
    assert_eq!(kept(&all, &RetentionPolicy { monthly: Some(2), ..policy() }, NOON), [2, 3]);
    // 2024-12-29, a Sunday, to 2025-01-01: one week has the last two days of 2024, too.
    let sunday = 1_735_473_600;
    let all = at(&[sunday, sunday + DAY, sunday + 2 * DAY, sunday + 3 * DAY]);
    assert_eq!(kept(&all, &RetentionPolicy { weekly: Some(2), ..policy() }, NOON), [1, 4]);
    assert_eq!(kept(&all, &RetentionPolicy { yearly: Some(2), ..policy() }, NOON), [3, 4]);
}

#[test]
fn days_begin_at_the_midnight_of_the_policy() {
    // 22:30, 23:30 and 00:30 UTC.
    let midnight = NOON + 12 * HOUR;
    let all = at(&[midnight - 5400, midnight - 1800, midnight + 1800]);
    let daily =
        |utc_offset_minutes| RetentionPolicy { daily: Some(2), utc_offset_minutes, ..policy() };
    assert_eq!(kept(&all, &daily(0), NOON), [2, 3]);
    assert_eq!(kept(&all, &daily(60), NOON), [1, 3]);
    assert_eq!(kept(&all, &daily(-60), NOON), [3], "all three are of one day");
}

#[test]
fn what_is_younger_than_an_age_stays_also_if_it_is_from_the_future() {
    let all = at(&[NOON - 8 * DAY, NOON - 7 * DAY, NOON - 7 * DAY + 1, NOON + 400 * DAY]);
    let week = RetentionPolicy { within_seconds: Some(7 * DAY), ..policy() };
    assert_eq!(kept(&all, &week, NOON), [3, 4]);
    // Long after all of them, one stays.
    assert_eq!(kept(&all, &week, NOON + 4000 * DAY), [4]);
}

#[test]
fn a_time_that_was_wrong_takes_a_period_only_until_newer_ones_follow() {
    // The clock of one snapshot was in 1970, that of another in 2106.
    let all = at(&[NOON, 0, 1 << 32, NOON + DAY, NOON + 2 * DAY, NOON + 3 * DAY]);
    let daily = RetentionPolicy { daily: Some(3), ..policy() };
    assert_eq!(kept(&all[..3], &daily, NOON), [1, 2, 3]);
    assert_eq!(kept(&all, &daily, NOON), [4, 5, 6]);
}

#[test]
fn the_wish_of_a_guest_counts_only_without_a_policy_or_where_no_rule_objects() {
    let mut all = at(&[NOON, NOON + HOUR, NOON + 2 * HOUR, NOON + 3 * HOUR]);
    for marked in [0, 1, 3] {
        all[marked].is_obsolete = true;
    }
    let decide = |policy: Option<&RetentionPolicy>| retention(&all, policy, NOON);
    let none = decide(None);
    assert_eq!(numbers(&all, &none), [3, 4]);
    assert_eq!(none[0], Verdict::Remove(Removed::Obsolete));
    assert_eq!(none[3], Verdict::Keep(Kept::LastStable));
    assert_eq!(numbers(&all, &decide(Some(&policy()))), [1, 2, 3, 4], "keep-all was set");
    let last = RetentionPolicy { last: Some(3), ..policy() };
    assert_eq!(numbers(&all, &decide(Some(&last))), [2, 3, 4]);
    all[0].is_pinned = true;
    assert_eq!(numbers(&all, &retention(&all, None, NOON)), [1, 3, 4]);
}

#[test]
fn without_a_stable_snapshot_nothing_with_content_goes() {
    let mut all = at(&[NOON, NOON + HOUR, NOON + 2 * HOUR]);
    for one in &mut all {
        one.state = SnapshotState::Available;
    }
    let last = RetentionPolicy { last: Some(1), ..policy() };
    let verdicts = retention(&all, Some(&last), NOON);
    assert_eq!(numbers(&all, &verdicts), [1, 2, 3]);
    assert_eq!(verdicts[0], Verdict::Keep(Kept::NoStable));
    // An older stable one stays beside the newest, which is only available.
    all[0].state = SnapshotState::Stable;
    let verdicts = retention(&all, Some(&last), NOON);
    assert_eq!(numbers(&all, &verdicts), [1, 3]);
    assert_eq!(verdicts[0], Verdict::Keep(Kept::LastStable));
}

#[test]
fn a_failure_goes_once_something_newer_is_stored() {
    let mut all = at(&[NOON, NOON + HOUR, NOON + 2 * HOUR]);
    all[0].state = SnapshotState::Failed;
    all[2].state = SnapshotState::Failed;
    let last = RetentionPolicy { last: Some(3), ..policy() };
    let verdicts = retention(&all, Some(&last), NOON);
    assert_eq!(verdicts[0], Verdict::Remove(Removed::Failed));
    assert_eq!(verdicts[2], Verdict::Keep(Kept::NewestFailure));
    assert_eq!(numbers(&all, &retention(&all, None, NOON)), [1, 2, 3]);
}

prop_compose! {
    fn any_policy()(
        last in option(20), within in prop::option::of(1..60 * DAY), hourly in option(30),
        daily in option(20), weekly in option(10), monthly in option(6), yearly in option(3),
        offset in -14_i16 * 60..=14 * 60,
    ) -> RetentionPolicy {
        RetentionPolicy {
            last, within_seconds: within, hourly, daily, weekly, monthly, yearly,
            utc_offset_minutes: offset,
        }
    }
}

fn option(max: u32) -> impl Strategy<Value = Option<u32>> {
    prop::option::of(1..max)
}

prop_compose! {
    fn any_candidate()(
        state in prop::sample::select(vec![
            SnapshotState::Stable, SnapshotState::Stable, SnapshotState::Stable,
            SnapshotState::Available, SnapshotState::Pending, SnapshotState::Failed,
            SnapshotState::Removing,
        ]),
        // Mostly some hours after the one before; sometimes the clock steps.
        step in prop_oneof![
            8 => 0..2 * DAY as i64,
            1 => -(40 * DAY as i64)..40 * DAY as i64,
        ],
        is_pinned in prop::bool::weighted(0.1),
        is_obsolete in prop::bool::weighted(0.1),
        is_protected in prop::bool::weighted(0.1),
    ) -> (i64, Candidate) {
        let protection = is_protected.then(|| "somebody reads it".to_owned());
        (step, Candidate { state, is_pinned, is_obsolete, protection, ..stable(0, 0) })
    }
}

fn any_image() -> impl Strategy<Value = Vec<Candidate>> {
    prop::collection::vec(any_candidate(), 0..120).prop_map(|steps| {
        let (mut time, mut all) = (NOON as i64, Vec::new());
        for (index, (step, one)) in steps.into_iter().enumerate() {
            time = (time + step).max(0);
            // Some numbers are missing.
            let number = index as u64 * 3 / 2 + 1;
            all.push(Candidate { number, time: time as u64, ..one });
        }
        all
    })
}

proptest! {
    #[test]
    fn no_policy_removes_what_is_never_removed(
        all in any_image(), policy in prop::option::of(any_policy()), now in NOON..2 * NOON
    ) {
        let verdicts = retention(&all, policy.as_ref(), now);
        prop_assert_eq!(verdicts.len(), all.len());
        let last = last_stable(&all);
        for (one, verdict) in all.iter().zip(&verdicts) {
            let is_safe = one.state == SnapshotState::Pending
                || one.state != SnapshotState::Removing
                    && (one.is_pinned
                        || one.protection.is_some()
                        || Some(one.number) == last
                        || one.state.has_content() && last.is_none());
            prop_assert!(!(is_safe && verdict.is_removal()), "{one:?}: {verdict}");
        }
    }

    #[test]
    fn without_rules_only_what_was_asked_to_go_goes(all in any_image()) {
        for (one, verdict) in all.iter().zip(retention(&all, None, NOON)) {
            let was_asked = one.is_obsolete || one.state == SnapshotState::Removing;
            prop_assert!(was_asked || !verdict.is_removal(), "{one:?}: {verdict}");
        }
        let keep_all = RetentionPolicy::default();
        for (one, verdict) in all.iter().zip(retention(&all, Some(&keep_all), NOON)) {
            let is_begun = one.state == SnapshotState::Removing;
            prop_assert!(is_begun || !verdict.is_removal(), "{one:?}: {verdict}");
        }
    }

    #[test]
    fn each_rule_keeps_at_most_its_number_and_one_for_each_period(
        all in any_image(), policy in any_policy()
    ) {
        let mut by_rule: BTreeMap<&str, Vec<Option<String>>> = BTreeMap::new();
        let pins: Vec<_> =
            all.iter().map(|one| Candidate { is_pinned: false, ..one.clone() }).collect();
        for verdict in retention(&pins, Some(&policy), NOON) {
            if let Verdict::Keep(Kept::Rule(rule, period)) = verdict {
                by_rule.entry(rule.name()).or_default().push(period);
            }
        }
        for (rule, count) in policy.counts() {
            let kept = by_rule.remove(rule.name()).unwrap_or_default();
            prop_assert!(kept.len() <= count as usize, "{rule}: {kept:?}");
            if rule != Rule::Last {
                let periods: HashSet<_> = kept.iter().collect();
                prop_assert_eq!(periods.len(), kept.len(), "{}", rule);
            }
        }
    }

    /// A rule alone, on a clock that never steps: for each of the newest periods the newest snapshot.
    #[test]
    fn one_rule_alone_keeps_the_newest_of_each_of_the_newest_periods(
        steps in prop::collection::vec(0..3 * DAY, 1..80),
        rule in 0..5_usize, count in 1..12_u32, offset in -14_i16 * 60..=14 * 60,
    ) {
        let times = steps.iter().scan(NOON, |time, step| { *time += step; Some(*time) });
        let all = at(&times.collect::<Vec<_>>());
        let mut policy = RetentionPolicy { utc_offset_minutes: offset, ..policy() };
        let (field, unit) = match rule {
            0 => (&mut policy.hourly, Unit::Hour),
            1 => (&mut policy.daily, Unit::Day),
            2 => (&mut policy.weekly, Unit::Week),
            3 => (&mut policy.monthly, Unit::Month),
            _ => (&mut policy.yearly, Unit::Year),
        };
        *field = Some(count);
        let mut expected: Vec<u64> = Vec::new();
        let mut periods: Vec<Period> = Vec::new();
        for one in all.iter().rev() {
            let period = Period::of(one.time, i64::from(offset) * 60, unit);
            if periods.last() != Some(&period) && periods.len() < count as usize {
                periods.push(period);
                expected.push(one.number);
            }
        }
        expected.reverse();
        prop_assert_eq!(kept(&all, &policy, NOON), expected);
    }

    #[test]
    fn a_rule_of_a_larger_number_alone_keeps_no_less(
        all in any_image(), count in 1..20_u32, rule in 0..6_usize
    ) {
        let with = |count| {
            let mut policy = policy();
            let fields = [
                &mut policy.last, &mut policy.hourly, &mut policy.daily, &mut policy.weekly,
                &mut policy.monthly, &mut policy.yearly,
            ];
            *fields.into_iter().nth(rule).unwrap() = Some(count);
            policy
        };
        let few: HashSet<u64> = kept(&all, &with(count), NOON).into_iter().collect();
        let many: HashSet<u64> = kept(&all, &with(count + 1), NOON).into_iter().collect();
        prop_assert!(few.is_subset(&many), "{few:?} {many:?}");
    }
}
