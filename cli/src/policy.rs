//! Retention: `policy` and `prune`.

use cairn_store::maintenance::prune::{PruneOptions, PrunedSnapshot};
use cairn_store::retention::RetentionPolicy;
use cairn_store::{AppliedPolicy, Image, Repository, Scope};
use serde_json::{Value, json};

use crate::args::{Policy, Rules, Style};
use crate::failure::{Doing, Exit, Failure, Outcome};
use crate::output::{Align, Listing, count, or_dash, print, print_fields, print_json};
use crate::time::utc;

pub(crate) fn run(repository: &Repository, command: &Policy, style: Style) -> Outcome {
    match command {
        Policy::Set { scope, rules } => set(repository, scope, *rules, style),
        Policy::Show { scope: None } => list(repository, style),
        Policy::Show { scope: Some(scope) } => show(repository, scope, style),
        Policy::Rm { scope } => {
            let doing = || format!("removing the policy of '{scope}'");
            repository.catalog().remove_policy(scope).doing(doing)?;
            match style.json {
                true => print_json(&json!({ "removed": scope.to_string() })),
                false => print(&format!("removed the policy of {scope}\n")),
            }
        }
    }
}

fn set(repository: &Repository, scope: &Scope, rules: Rules, style: Style) -> Outcome {
    let doing = || format!("setting the policy of '{scope}'");
    let policy = RetentionPolicy {
        last: rules.keep_last,
        within_seconds: rules.keep_within,
        hourly: rules.keep_hourly,
        daily: rules.keep_daily,
        weekly: rules.keep_weekly,
        monthly: rules.keep_monthly,
        yearly: rules.keep_yearly,
        utc_offset_minutes: rules.utc_offset,
    };
    let why = match (rules.keep_all, policy.keeps_all()) {
        (true, false) => "--keep-all keeps every snapshot; leave it or the other rules out",
        (false, true) => "state at least one rule, such as --keep-last 7, or --keep-all",
        _ => "",
    };
    if !why.is_empty() {
        return Err(Failure::new(Exit::Usage, doing(), why));
    }
    repository.catalog().set_policy(scope, &policy).doing(doing)?;
    if style.json {
        return print_json(&json!({ "scope": scope.to_string(), "policy": policy }));
    }
    if matches!(scope, Scope::Folder(_)) {
        let mut is_any = false;
        let each = |image: Image| {
            is_any |= scope.contains(&image.name);
            Ok(!is_any)
        };
        repository.catalog().each_image_while(each).doing(doing)?;
        if !is_any {
            eprintln!("note: no image is in {scope} now");
        }
    }
    print(&format!("{scope}: {policy}\n"))
}

fn list(repository: &Repository, style: Style) -> Outcome {
    let heading = [("SCOPE", Align::Left), ("SET", Align::Left), ("POLICY", Align::Left)];
    let mut listing = Listing::new(style, &heading);
    for one in repository.catalog().policies().doing(|| "listing the policies".into())? {
        let row = || [one.scope.to_string(), utc(one.set), one.policy.to_string()];
        listing.add(|| applied_json(&one), row);
    }
    listing.end()
}

fn show(repository: &Repository, scope: &Scope, style: Style) -> Outcome {
    let doing = || format!("showing the policy of '{scope}'");
    let applied = match scope {
        Scope::Image(image) => {
            repository.catalog().image(image).doing(doing)?;
            repository.catalog().policy_of(image).doing(doing)?
        }
        // A new image in the folder would get it.
        Scope::Folder(_) | Scope::All => {
            repository.catalog().policy_of_scope(scope).doing(doing)?
        }
    };
    if style.json {
        return print_json(&applied.as_ref().map_or(Value::Null, applied_json));
    }
    let policy = applied.as_ref().map_or("keep-all".into(), |one| one.policy.to_string());
    let set_on =
        applied.as_ref().map_or("nothing: no policy applies".into(), |one| one.scope.to_string());
    print_fields(&[
        ("images", scope.to_string()),
        ("policy", policy),
        ("set on", set_on),
        ("set", or_dash(applied.map(|one| utc(one.set)))),
    ])
}

fn applied_json(one: &AppliedPolicy) -> Value {
    json!({ "scope": one.scope.to_string(), "set": one.set, "policy": one.policy })
}

pub(crate) fn prune(
    repository: &Repository,
    scope: &Scope,
    is_dry_run: bool,
    style: Style,
) -> Outcome {
    let heading = [
        ("SNAPSHOT", Align::Left),
        ("TIME", Align::Left),
        ("ACTION", Align::Left),
        ("POLICY OF", Align::Left),
        ("REASON", Align::Left),
    ];
    let mut listing = Listing::new(style, &heading);
    let (mut removed, mut total) = (0, 0);
    let action = |one: &PrunedSnapshot| match (one.is_removed, is_dry_run) {
        (false, _) => "keep",
        (true, true) => "remove",
        (true, false) => "removed",
    };
    let options = PruneOptions { is_dry_run, ..PruneOptions::default() };
    let pruned = cairn_store::maintenance::prune::prune(repository, scope, &options, &mut |one| {
        total += 1;
        removed += u64::from(one.is_removed);
        let json = || {
            json!({
                "snapshot": one.name.to_string(),
                "time": one.time,
                "action": action(&one),
                "policy": one.policy.as_ref().map(ToString::to_string),
                "reason": one.reason,
            })
        };
        let row = || {
            let policy = or_dash(one.policy.as_ref());
            let action = action(&one).to_owned();
            [one.name.to_string(), utc(one.time), action, policy, one.reason.clone()]
        };
        listing.add(json, row);
        Ok(())
    });
    // What was removed before a failure is printed, too.
    listing.end()?;
    pruned.doing(|| format!("pruning '{scope}'"))?;
    if style.json {
        return Ok(());
    }
    let total = count(total, "snapshot");
    match is_dry_run {
        true => print(&format!("would remove {removed} of {total}\n")),
        false => print(&format!("removed {removed} of {total}\n")),
    }
}
