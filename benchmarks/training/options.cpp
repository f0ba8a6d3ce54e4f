#include "benchmarks/training/options.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <map>

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
void add_choice(CLI::App& app, const std::string& option, Value& to, const std::map<std::string, Value>& values,
                const std::string& text) {
  app.add_option_function<std::string>(
         option, [&to, values](const std::string& word) { to = values.at(word); }, text)
      ->check(CLI::IsMember(values));
}

void describe_steps(CLI::App& app, RunOptions& o) {
  const std::map<std::string, DType> formats{{"bf16", DType::bf16}, {"fp32", DType::fp32}};
  app.add_option("--layers", o.model.layers, "Layers");
  app.add_option("--width", o.model.hidden, "Width of the residual stream");
  app.add_option("--heads", o.model.heads, "Attention heads");
  app.add_option("--vocabulary", o.model.vocabulary, "Tokens that there are");
  add_choice(app, "--dtype", o.model.dtype, formats, "Format of parameters and activations");
  app.add_flag("!--untied", o.model.tied, "Give the head its own weight instead of the embedding's");
  app.add_option("--context", o.batch.context, "Tokens of a sequence");
  app.add_option("--batch", o.batch.sequences, "Sequences in a micro-step of each rank")->check(CLI::PositiveNumber);
  app.add_option("--micro-steps", o.training.micro_steps, "Backward passes in a step")->check(CLI::PositiveNumber);
  app.add_flag("--layer-major", o.training.schedule.layer_major,
               "Let all micro-steps go through a layer before the next layer");
  app.add_flag("--borders-on-host", o.batch.borders_on_host, "Keep the inputs of layers in host memory (GPUs)");
  app.add_option("--steps", o.steps, "Total number of steps, including those before a restart");
  app.add_option("--max-norm", o.training.max_norm, "Clip gradients to this norm");
}

void describe_placement(CLI::App& app, TrainingOptions& training) {
  std::map<std::string, StateFormat> formats;
  for (const StateFormat format : all_state_formats) {
    formats.emplace(name(format), format);
  }
  const std::map<std::string, GradientFormat> gradient_formats{{"fp32", GradientFormat::fp32},
                                                               {"bf16", GradientFormat::bf16}};
  const auto spread = [&](const char* option, Spread& to, const char* text) {
    app.add_option_function<std::string>(
        option, [&to](const std::string& tier) { to = spread_from(tier); }, text);
  };
  app.add_option("--stage", training.stage, "ZeRO stage")->check(CLI::Range(0, 3));
  spread("--parameters", training.parameters, "Tier of the parameters: device, host, nvme, or device=0.3,host=0.7");
  spread("--gradients", training.gradients, "Tier of the reduced gradients");
  spread("--state", training.state, "Tier of the optimizer state");
  add_choice(app, "--state-format", training.format, formats, "Format of the optimizer state");
  add_choice(app, "--gradient-format", training.gradient_format, gradient_formats,
             "Format of the reduced gradients of bf16 parameters");
  app.add_option("--drive", training.drives.directories, "A directory on a drive for the nvme tier; can be repeated")
      ->take_all()
      ->check(CLI::ExistingDirectory);
  app.add_option("--run", training.drives.run, "Name of the run; an existing run resumes after its last step");
  app.add_flag("--mirror", training.drives.mirror, "Keep the run's records on a drive of another rank too");
  app.add_option("--prefetch", training.schedule.prefetch, "Units to gather ahead");
  app.add_option("--tile", training.tile_elements, "Elements to update, read and write at a time; 0: Ballast chooses")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::PositiveNumber);
  app.add_option("--staging", training.schedule.staging_slots, "Tiles in flight from and to drives");
  app.add_option("--most-repeats", training.schedule.most_repeats,
                 "Share of steps that may make updates again: see Schedule::most_repeats")
      ->check(CLI::Range(0.0, 1.0));
  app.add_flag("--update-in-backward", training.schedule.update_in_backward,
               "Update a unit as soon as its gradients are reduced");
}

}  // namespace

void describe(CLI::App& app, RunOptions& o) {
  app.option_defaults()->take_last()->always_capture_default();  // options after those of a script replace them
  describe_steps(app, o);
  describe_placement(app, o.training);
  app.add_flag("--wait-for-updates", o.waits_for_updates, "Wait for the updates of a step before the next one begins");
  app.add_option("--ranks", o.ranks, "Ranks, as threads of this process (not with a launcher)")
      ->check(CLI::Range(1, 64));
  app.add_option("--threads", o.training.threads, "CPU threads of each rank; 0: its share of the cores")
      ->check(CLI::Range(0, 1024));
  app.add_flag("--gpu", o.on_gpu, "Compute on GPUs: rank r on the GPU r of its machine");
  app.add_flag("--forecast", o.forecasts, "Measure this machine first, and forecast the time of a step (CPUs)");
  app.add_flag("--hash", o.hashes_parameters, "Write a hash of the final parameters, after the steps");
}

}  // namespace ballast::benchmarks
