// A Llama as the Hugging Face Hub describes it: its configuration, and its units and tensors under the names of its files.
#pragma once

#include <ballast/local_state.h>
#include <ballast/model.h>

#include <filesystem>
#include <optional>
#include <vector>

namespace ballast::llama {

// Llama 3's: slow rotations become slower by `factor`.
struct RopeScaling {
  double factor = 8.0;
  double low_frequency_factor = 1.0;
  double high_frequency_factor = 4.0;
  double original_context = 8192.0;
};

struct Config {
  std::size_t vocabulary = 0;
  std::size_t hidden = 0;
  std::size_t intermediate = 0;
  std::size_t layers = 0;
  std::size_t heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_width = 0;
  float epsilon = 1e-6f;
  double rope_base = 10000.0;
  std::optional<RopeScaling> rope_scaling{};
  bool tied = false;            // the head's weight is the embedding's table
  bool has_biases = false;      // of queries, keys and values: Qwen 2
  bool has_head_norms = false;  // of queries and keys: Qwen 3
  DType dtype = DType::bf16;

  std::size_t query_width() const { return heads * head_width; }
  std::size_t kv_width() const { return kv_heads * head_width; }
};

// Reads config.json of a folder, for the families llama, mistral, qwen2 and qwen3. Throws B1005 for what the trainer cannot compute.
Config read_config(const std::filesystem::path& folder);

// Cosine and sine of each pair of a head, in a row for each position.
std::vector<float> rope_angles(const Config& config, std::size_t context);

struct Linear {
  TensorId weight{};
  std::size_t inputs = 0;
  std::optional<TensorId> bias{};
};

struct Layer {
  std::size_t unit = 0;
  Linear q{}, k{}, v{}, o{}, gate{}, up{}, down{};
  TensorId norm{}, second_norm{};
  TensorId q_norm{}, k_norm{};  // only if the configuration has them
};

// Units: the embedding, the layers, the head. Matrices are in parameter group 0; norms and biases in group 1, which has no weight
// decay.
struct Architecture {
  explicit Architecture(const Config& config);

  Model model;
  TensorId table{}, norm{};
  Linear head{};
  std::vector<Layer> layers{};
};

// Ones for norms, zeros for biases, and for matrices nearly normal values of a deviation of 0.02.
ParameterSource initial_values(const Model& model, std::uint64_t seed);

std::size_t parameters_of(const Model& model);

}  // namespace ballast::llama
