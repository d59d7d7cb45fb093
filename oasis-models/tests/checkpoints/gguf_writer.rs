//! A small GGUF writer, for synthetic files.

/// A file under construction.
#[derive(Clone, Default)]
pub struct GgufWriter {
    keys: Vec<Vec<u8>>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl GgufWriter {
    fn key(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([&string(key), kind.to_le_bytes().as_slice(), value].concat());
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.key(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.key(key, 6, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.key(key, 8, &string(value))
    }

    fn array(self, key: &str, kind: u32, items: &[Vec<u8>]) -> Self {
        let head = [kind.to_le_bytes().as_slice(), &(items.len() as u64).to_le_bytes()].concat();
        self.key(key, 9, &[head, items.concat()].concat())
    }

    pub fn texts(self, key: &str, items: &[&str]) -> Self {
        self.array(key, 8, &items.iter().map(|item| string(item)).collect::<Vec<_>>())
    }

    pub fn integers(self, key: &str, items: &[i32]) -> Self {
        self.array(key, 5, &items.iter().map(|item| item.to_le_bytes().to_vec()).collect::<Vec<_>>())
    }

    /// A tensor of a ggml type; `shape` is slowest dimension first.
    pub fn raw_tensor(mut self, name: &str, shape: &[usize], kind: u32, data: &[u8]) -> Self {
        let shape = shape.iter().rev().map(|&size| size as u64).collect();
        self.tensors.push((name.to_owned(), shape, kind, data.to_vec()));
        self
    }

    pub fn tensor(self, name: &str, shape: &[usize], data: &[f32]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        let bytes: Vec<u8> = data.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw_tensor(name, shape, 0, &bytes)
    }

    /// Bytes before the tensor data.
    pub fn header_len(&self) -> usize {
        let data: usize = self.tensors.iter().map(|(.., bytes)| bytes.len().next_multiple_of(32)).sum();
        self.bytes().len() - data
    }

    /// The file's bytes, version 3, alignment 32.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        out.extend(self.keys.concat());
        let mut data = Vec::new();
        for (name, shape, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((shape.len() as u32).to_le_bytes());
            out.extend(shape.iter().flat_map(|size| size.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

/// A tokenizer of two letters and a control token, padded to `vocab` tokens.
pub fn with_tokenizer(writer: GgufWriter, vocab: usize) -> GgufWriter {
    let mut tokens = vec!["a".to_owned(), "b".to_owned(), "ab".to_owned(), "<|end|>".to_owned()];
    tokens.extend((4..vocab).map(|index| format!("pad{index}")));
    let mut types = vec![1; vocab];
    types[3] = 3;
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    writer
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &types)
        .texts("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.eos_token_id", 3)
        .u32("tokenizer.ggml.bos_token_id", 3)
        .text("tokenizer.chat_template", "{{ bos_token }}{{ messages[0].content }}")
}
