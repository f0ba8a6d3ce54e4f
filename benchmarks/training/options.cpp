#include "benchmarks/training/options.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <vector>

#include "kernels/runtime/sizes.h"

namespace ballast::benchmarks {
namespace {

std::size_t tier_from(const std::string& text) {
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (text == name(static_cast<Tier>(tier))) return tier;
  }
  fail(Code::bad_argument, {.what = fmt::format("there is no tier \"{}\"", text), .needed = "device, host or nvme"});
}

// "host", or fractions: "device=0.3,host=0.7".
Spread spread_from(const std::string& text) {
  if (text.find('=') == std::string::npos) return all_in(static_cast<Tier>(tier_from(text)));
  std::array<double, tier_count> fractions{};
  for (const std::string& part : CLI::detail::split(text, ',')) {
    const std::size_t sign = part.find('=');
    const std::size_t tier = tier_from(part.substr(0, sign));
    const bool is_number =
        sign != std::string::npos && CLI::detail::lexical_cast(part.substr(sign + 1), fractions[tier]);
    require(is_number, Code::bad_argument, [&] {
      return Problem{.what = fmt::format("cannot read \"{}\" as a fraction of a tier", part),
                     .needed = "such as host=0.5"};
    });
  }
  return {fractions[0], fractions[1], fractions[2]};
}

// Adds a choice by name. CLI11's own transformer would show the values of the enumeration in --help.
template <class Value>
CLI::Option* add_choice(CLI::App& app, const std::string& option, Value& to, const std::map<std::string, Value>& values,
                        const std::string& text) {
  const auto choose = [&to, option, values](const std::string& word) {
    const auto found = values.find(word);
    require(found != values.end(), Code::bad_argument, [&] {
      std::vector<std::string> names;
      names.reserve(values.size());
      for (const auto& [name, value] : values) {
        names.push_back(name);
      }
      return Problem{.what = fmt::format("cannot set {} to \"{}\"", option, word),
                     .needed = fmt::format("one of {}", fmt::join(names, ", "))};
    });
    to = found->second;
  };
  return app.add_option_function<std::string>(option, choose, text)->type_name("NAME");
}

void describe_model(CLI::App& app, RunOptions& run) {
  app.option_defaults()->group("Model");
  const std::map<std::string, DType> formats{{"bf16", DType::bf16}, {"fp32", DType::fp32}};
  llama::Config& model = run.model;
  model = {.vocabulary = 256, .hidden = 768, .layers = 8, .heads = 12, .tied = true};
  app.add_option("--layers", model.layers, "Layers")->capture_default_str();
  app.add_option("--width", model.hidden, "Width of the residual stream")->capture_default_str();
  app.add_option("--heads", model.heads, "Attention heads")->capture_default_str();
  app.add_option("--kv-heads", model.kv_heads, "Heads of keys and values (default: all)");
  app.add_option("--inner", model.intermediate, "Width inside of an MLP (default: 8/3 of the width)");
  app.add_option("--vocabulary", model.vocabulary, "Tokens that there are")->capture_default_str();
  app.add_option("--context", run.batch.context, "Tokens of a sequence")->capture_default_str();
  app.add_flag("!--untied", model.tied, "Give the head its own weight instead of the embedding's");
  add_choice(app, "--dtype", model.dtype, formats, "Format of parameters and activations: bf16 (default) or fp32");
}

void describe_steps(CLI::App& app, RunOptions& run) {
  app.option_defaults()->group("Steps");
  app.add_option("--text", run.text, "Files to learn from, as bytes or as tokens (default: made-up sequences)")
      ->take_all()
      ->check(CLI::ExistingFile);
  app.add_option("--steps", run.steps, "Total number of steps, including those before a restart")
      ->capture_default_str();
  app.add_option("--batch", run.batch.sequences, "Sequences in a micro-step of each rank")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--micro-steps", run.training.micro_steps, "Backward passes in a step")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--lr", run.lr, "Learning rate of AdamW")->capture_default_str();
  app.add_option("--weight-decay", run.weight_decay, "Weight decay of matrices and tables")->capture_default_str();
  app.add_option("--max-norm", run.training.max_norm, "Clip gradients to this norm");
  app.add_option("--seed", run.seed, "Seed of the initial values and of the sequences")->capture_default_str();
}

void describe_placement(CLI::App& app, RunOptions& run) {
  TrainingOptions& training = run.training;
  app.option_defaults()->group("Memory");
  std::map<std::string, StateFormat> formats;
  for (const StateFormat format : all_state_formats) {
    formats.emplace(name(format), format);
  }
  const std::map<std::string, GradientFormat> gradient_formats{{"fp32", GradientFormat::fp32},
                                                               {"bf16", GradientFormat::bf16}};
  const auto spread = [&](const char* option, Spread& to, const char* text) {
    app.add_option_function<std::string>(
           option, [&to](const std::string& tier) { to = spread_from(tier); }, text)
        ->type_name("TIER");
  };
  app.add_option("--stage", training.stage, "ZeRO stage, 0 to 3")->capture_default_str()->check(CLI::Range(0, 3));
  spread("--parameters", training.parameters, "Tier of the parameters: device, host, nvme, or device=0.3,host=0.7");
  spread("--gradients", training.gradients, "Tier of the reduced gradients");
  spread("--state", training.state, "Tier of the optimizer state");
  add_choice(app, "--state-format", training.format, formats,
             "Format of the optimizer state: fp32, split (default), bf16, compact or 4bit");
  add_choice(app, "--gradient-format", training.gradient_format, gradient_formats,
             "Format of the reduced gradients of bf16 parameters: fp32 (default) or bf16");
  app.add_option("--drive", training.drives.directories, "A directory on a drive for the nvme tier; can be repeated")
      ->take_all()
      ->check(CLI::ExistingDirectory);
  app.add_option("--run", training.drives.run,
                 "Name of the run; an existing run of this name resumes after its last step");
  app.add_flag("--mirror", training.drives.mirror, "Keep the run's records on a drive of another rank too");
}

void describe_schedule(CLI::App& app, RunOptions& run) {
  app.option_defaults()->group("Schedule");
  TrainingOptions& training = run.training;
  app.add_option("--prefetch", training.schedule.prefetch, "Units to gather ahead")->capture_default_str();
  app.add_option("--tile", training.tile_elements,
                 "Elements to update, read and write at a time; 0: the library chooses")
      ->capture_default_str()
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::PositiveNumber);
  app.add_option("--staging", training.schedule.staging_slots, "Tiles in flight from and to drives")
      ->capture_default_str();
  app.add_flag("--layer-major", training.schedule.layer_major,
               "Let all micro-steps go through a layer before the next layer");
  app.add_flag("--update-in-backward", training.schedule.update_in_backward,
               "Update a unit as soon as its gradients are reduced");
  app.add_flag("--wait-for-updates", run.waits_for_updates,
               "Wait for the updates of a step before the next one begins");
}

void describe_machine(CLI::App& app, ProgramOptions& options) {
  app.option_defaults()->group("Machine");
  app.add_option("--ranks", options.ranks, "Ranks, as threads of this process (not with a launcher)")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--threads", options.threads, "CPU threads of each rank (default: its share of the cores)")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--gpu", options.on_gpu, "Compute on GPUs: rank r on the GPU r of its machine");
  MemoryOptions& memory = options.run.memory;
  app.add_option_function<std::string>(
         "--memory-limit", [&memory](const std::string& bytes) { memory.limit = parse_bytes(bytes); },
         "Memory of this process, such as 4GiB: a run that needs more is refused, and the kernel enforces it")
      ->type_name("BYTES")
      ->excludes("--gpu");
}

void describe_output(CLI::App& app, ProgramOptions& options) {
  app.option_defaults()->group("Output");
  app.add_flag("--forecast", options.run.forecasts,
               "Measure this machine first, and forecast the time of a step (CPUs)");
  app.add_flag("!--no-matrix-rate", options.run.measures_rate,
               "Begin without measuring the rate of matrix products, which the use of the machine is compared with");
  app.add_option("--losses", options.losses,
                 "Write losses and norms with all their bits, and a hash of the final parameters");
  app.add_option("--json", options.json, "Write a line of JSON for each step");
  app.add_option("--timeline", options.timeline, "Write what ran when on rank 0, for ui.perfetto.dev");
  app.add_option("--save", options.save, "Write the final parameters, in fp32, one after the other");
}

}  // namespace

void complete(llama::Config& model) {
  require(model.layers > 0 && model.heads > 0 && model.hidden > 0 && model.hidden % (2 * model.heads) == 0,
          Code::bad_argument, [&] {
            return Problem{.what = fmt::format("cannot divide a width of {} among {} heads", model.hidden, model.heads),
                           .needed = "layers, and heads of an even width"};
          });
  constexpr std::size_t step = 32;
  model.head_width = model.hidden / model.heads;
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  if (model.intermediate == 0) model.intermediate = (model.hidden * 8 / 3 + step - 1) / step * step;
}

void describe(CLI::App& app, ProgramOptions& options) {
  app.option_defaults()->take_last();  // options after those of a script replace them
  app.parse_complete_callback([&options] { complete(options.run.model); });
  describe_model(app, options.run);
  describe_steps(app, options.run);
  describe_placement(app, options.run);
  describe_schedule(app, options.run);
  describe_machine(app, options);
  describe_output(app, options);
}

}  // namespace ballast::benchmarks
