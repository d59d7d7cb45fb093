//! Mixtures of experts and draws on the CPU: what the GPU is compared with, and that the comparison tells right from wrong.

use oasis_tests::mixtures::{NEAR, Reference, batch, check_draws, draws, model, swapped};
use oasis_tests::models::dense;

#[test]
fn the_rule_lets_rounding_pass_and_wrong_experts_not() {
    for normalize in [true, false] {
        let model = model(normalize);
        let reference = Reference::new(&model);
        assert_eq!(reference.compare(&mut dense(&model.cpu, 512)), (0.0, 0), "a batch on the CPU is the same bits");
        let (gap, different) = reference.compare(&mut dense(&model.disturbed(), 512));
        println!("normalize {normalize}: rounding: {different} differ, gap {gap:.4}");
        assert!(gap < NEAR, "rounding alone differs at {different} places, gap {gap}");
        let (gap, different) = reference.compare(&mut dense(&swapped(&model), 512));
        println!("normalize {normalize}: two swapped: {different} differ, gap {gap:.4}");
        assert!(gap > NEAR, "two experts in each other's place pass: {different} places differ, gap {gap}");
    }
}

#[test]
fn draws_pass_their_own_check() {
    let model = model(true);
    check_draws(&model, &batch(&mut dense(&model.cpu, 512), &draws(), None));
}
