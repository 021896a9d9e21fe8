//! A retention policy: the rules by which snapshots of an image are kept.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The largest offset from UTC, in minutes: places on Earth have -12 to +14 hours.
const MAX_OFFSET_MINUTES: u16 = 14 * 60;

/// The rules of a policy, in the order in which they select snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The newest snapshots.
    Last,
    /// The snapshots that are younger than some age.
    Within,
    /// The newest snapshot of each hour.
    Hourly,
    /// The newest snapshot of each day.
    Daily,
    /// The newest snapshot of each week. Weeks start on Monday.
    Weekly,
    /// The newest snapshot of each month.
    Monthly,
    /// The newest snapshot of each year.
    Yearly,
}

impl Rule {
    /// The rule's name, as in the options of `cairn policy set`.
    pub fn name(self) -> &'static str {
        match self {
            Rule::Last => "keep-last",
            Rule::Within => "keep-within",
            Rule::Hourly => "keep-hourly",
            Rule::Daily => "keep-daily",
            Rule::Weekly => "keep-weekly",
            Rule::Monthly => "keep-monthly",
            Rule::Yearly => "keep-yearly",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which snapshots of an image a prune keeps. A policy without a rule keeps all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetentionPolicy {
    /// How many of the newest snapshots are kept.
    pub last: Option<u32>,
    /// Snapshots that are younger than this many seconds are kept.
    pub within_seconds: Option<u64>,
    /// For how many hours the newest snapshot is kept.
    pub hourly: Option<u32>,
    /// For how many days the newest snapshot is kept.
    pub daily: Option<u32>,
    /// For how many weeks the newest snapshot is kept.
    pub weekly: Option<u32>,
    /// For how many months the newest snapshot is kept.
    pub monthly: Option<u32>,
    /// For how many years the newest snapshot is kept.
    pub yearly: Option<u32>,
    /// The clock by which hours, days, weeks, months and years begin: minutes ahead of UTC.
    pub utc_offset_minutes: i16,
}

impl RetentionPolicy {
    /// The rules of this policy that keep a number of snapshots, in their order.
    pub fn counts(&self) -> impl Iterator<Item = (Rule, u32)> {
        let all = [
            (Rule::Last, self.last),
            (Rule::Hourly, self.hourly),
            (Rule::Daily, self.daily),
            (Rule::Weekly, self.weekly),
            (Rule::Monthly, self.monthly),
            (Rule::Yearly, self.yearly),
        ];
        all.into_iter().filter_map(|(rule, count)| Some((rule, count?)))
    }

    /// Whether the policy has no rule, so that it keeps all snapshots.
    pub fn keeps_all(&self) -> bool {
        self.within_seconds.is_none() && self.counts().next().is_none()
    }

    /// Fails if a rule keeps nothing, or if no place has the offset from UTC.
    pub fn check(&self) -> Result<()> {
        let empty = self.counts().find(|(_, count)| *count == 0).map(|(rule, _)| rule);
        let empty = empty.or((self.within_seconds == Some(0)).then_some(Rule::Within));
        if let Some(rule) = empty {
            let message = format!("--{rule} 0 keeps nothing; leave the option out, or state more");
            return Err(Error::BadArgument(message));
        }
        if self.utc_offset_minutes.unsigned_abs() > MAX_OFFSET_MINUTES {
            let message = "an offset from UTC is between -14:00 and +14:00";
            return Err(Error::BadArgument(message.into()));
        }
        Ok(())
    }
}

/// The options of `cairn policy set` that make this policy.
impl fmt::Display for RetentionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.keeps_all() {
            return f.pad("keep-all");
        }
        let mut rules: Vec<String> = Vec::new();
        let last = self.counts().filter(|(rule, _)| *rule == Rule::Last);
        rules.extend(last.map(|(rule, count)| format!("{rule} {count}")));
        rules.extend(self.within_seconds.map(|age| format!("{} {}", Rule::Within, span(age))));
        let periods = self.counts().filter(|(rule, _)| *rule != Rule::Last);
        rules.extend(periods.map(|(rule, count)| format!("{rule} {count}")));
        if self.utc_offset_minutes != 0 {
            let (sign, minutes) = match self.utc_offset_minutes {
                minutes @ ..0 => ('-', -minutes),
                minutes => ('+', minutes),
            };
            rules.push(format!("at UTC{sign}{:02}:{:02}", minutes / 60, minutes % 60));
        }
        f.pad(&rules.join(", "))
    }
}

/// A time span in the largest unit that divides it, such as `7d`.
fn span(seconds: u64) -> String {
    let units = [(86_400, 'd'), (3600, 'h'), (60, 'm')];
    let unit = units.into_iter().find(|(unit, _)| seconds.is_multiple_of(*unit));
    let (unit, suffix) = unit.unwrap_or((1, 's'));
    format!("{}{suffix}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::RetentionPolicy;

    #[test]
    fn a_policy_is_shown_as_its_rules_in_their_order() {
        let policy = RetentionPolicy {
            last: Some(2),
            within_seconds: Some(7 * 86_400),
            hourly: Some(24),
            yearly: Some(1),
            utc_offset_minutes: -330,
            ..RetentionPolicy::default()
        };
        let text = "keep-last 2, keep-within 7d, keep-hourly 24, keep-yearly 1, at UTC-05:30";
        assert_eq!(policy.to_string(), text);
        assert_eq!(RetentionPolicy::default().to_string(), "keep-all");
    }

    #[test]
    fn a_rule_that_keeps_nothing_is_refused_with_its_name() {
        let bad = |policy: RetentionPolicy| policy.check().unwrap_err().to_string();
        let default = RetentionPolicy::default;
        assert!(bad(RetentionPolicy { last: Some(0), ..default() }).contains("--keep-last 0"));
        let within = RetentionPolicy { within_seconds: Some(0), ..default() };
        assert!(bad(within).contains("--keep-within 0"));
        let yearly = RetentionPolicy { last: Some(1), yearly: Some(0), ..default() };
        assert!(bad(yearly).contains("--keep-yearly 0"));
        let far = RetentionPolicy { utc_offset_minutes: 841, ..default() };
        assert!(bad(far).contains("+14:00"));
        RetentionPolicy { utc_offset_minutes: i16::MIN, ..default() }.check().unwrap_err();
        default().check().unwrap();
    }
}
