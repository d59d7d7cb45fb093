use super::*;
use oasis_core::geometry::{KvDtype, KvGeometry};

fn info(budget_blocks: Option<usize>) -> ExecutorInfo {
    let geometry =
        KvGeometry { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 64, block_tokens: 16, dtype: KvDtype::F32 };
    ExecutorInfo { device: "cpu, 2 threads".to_owned(), geometry, budget_blocks, cap: 3, vocab: 10, max_context: 4096 }
}

fn request(generated_tokens: usize) -> RequestFacts {
    let device = KvFootprint { working_set: 64 << 10, summaries: 32 << 10, draft: 4 << 10, prefill: 0 };
    let prefill = Duration::from_millis(500);
    RequestFacts { prompt_tokens: 1000, generated_tokens, prefill, decode: Duration::from_secs(2), device }
}

fn lines(report: &RunReport) -> String {
    let mut out = Vec::new();
    report.write(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn a_sparse_run_says_what_it_cost() {
    let stats = ExecutorStats {
        steps: 24,
        admitted_entries: 30,
        cap_entries: 40,
        deferred_entries: 1200,
        link_bytes: 24 * 2048,
        ..ExecutorStats::default()
    };
    let agreement = Agreement::of_layers(vec![0.9, 0.7]);
    let report = RunReport::new("m".to_owned(), None, &info(Some(8)), &stats, &request(25)).with_agreement(agreement);
    let text = lines(&report);
    for part in [
        "model      m, no draft head",
        "prefill    1,000 tokens in 0.50 s, 2000.0 tokens/s",
        "decode     25 tokens in 2.00 s, 12.0 tokens/s",
        "budget     8 blocks of 16 tokens a KV head",
        "device KV  100.0 KiB, 4.9% of a dense cache's 2.0 MiB",
        "link       2.0 KiB a step, 48.0 KiB in 24 steps",
        "cap        30 of 40 entries admitted (75%), 1,200 deferred",
        "agreement  0.800 mean, 0.700 in the worst layer",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["link"]["bytes_per_step"], 2048.0);
    assert_eq!(json["memory"]["dense_bytes"], 1024 * 2 * 2 * 2 * 64 * 4);
}

#[test]
fn a_dense_run_has_no_link() {
    let report = RunReport::new("m".to_owned(), None, &info(None), &ExecutorStats::default(), &request(1));
    let text = lines(&report);
    assert!(text.contains("all blocks (dense)") && !text.contains("link"), "{text}");
    assert_eq!(report.speed.decode_tokens_per_second, None);
}

#[test]
fn an_unread_prompt_has_no_rate() {
    let report = RunReport::new("m".to_owned(), None, &info(None), &ExecutorStats::default(), &request(0));
    assert_eq!(report.speed.prefill_tokens_per_second, None);
    assert!(lines(&report).contains("1,000 tokens, not finished after 0.50 s"));
}
