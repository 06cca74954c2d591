// What has no schedule is refused in words; the caller then takes the reference pipeline.
// RUN: gossamer-opt %s -p schedule --split-input-file --verify-diagnostics

// A format of the importer's, before choose-format.
// expected-error @unknown {{no broadcast schedule for a weight stored as CSR}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @format(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, #CSR>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, #CSR>) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// The weight on the left.
// expected-error @unknown {{no schedule for kernel.contract of tensor<32x64xf32, #sparse_tensor.encoding<}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @left(%x: tensor<32x64xf32, #CSR>, %w: tensor<64x?xf32>) -> tensor<32x?xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(m, t, k) -> (m, k)>, affine_map<(m, t, k) -> (k, t)>]}
    : (tensor<32x64xf32, #CSR>, tensor<64x?xf32>) -> tensor<32x?xf32>
  return %y : tensor<32x?xf32>
}

// -----

// A batch of products.
// expected-error @unknown {{no schedule for kernel.contract of tensor<3x?x64xf32> and tensor<32x64xf32, }}
func.func @batch(%x: tensor<3x?x64xf32>, %w: tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<3x?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {indexing_maps = [affine_map<(b, t, m, k) -> (b, t, k)>, affine_map<(b, t, m, k) -> (m, k)>]}
    : (tensor<3x?x64xf32>, tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<3x?x32xf32>
  return %y : tensor<3x?x32xf32>
}

// -----

// Kernels read along the rows of the result.
// expected-error @unknown {{no schedule for an epilogue that reads by (d0, d1) -> (d1, d0), which is not in order}}
func.func @turned(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, "padded(reduction=1, columns=32)">, %residual: tensor<32x?xf32>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %r = "kernel.read"(%residual) {map = affine_map<(t, m) -> (m, t)>} : (tensor<32x?xf32>) -> f32
    %0 = arith.addf %sum, %r : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// Kernels read neighbours, not every second number.
// expected-error @unknown {{no schedule for an epilogue that reads by (d0, d1) -> (d1 * 2)}}
func.func @strided(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, "padded(reduction=1, columns=32)">, %bias: tensor<64xf32>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %r = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m * 2)>} : (tensor<64xf32>) -> f32
    %0 = arith.addf %sum, %r : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// A mask of bits in memory is something else than a vector of bits.
// expected-error @unknown {{no schedule for elements of type i1}}
func.func @mask(%x: tensor<?x64xf32>, %w: tensor<32x64xf32, "padded(reduction=1, columns=32)">, %keep: tensor<?x32xi1>) -> tensor<?x32xf32> {
  %y = "kernel.contract"(%x, %w) ({
  ^bb0(%sum: f32):
    %k = "kernel.read"(%keep) {map = affine_map<(t, m) -> (t, m)>} : (tensor<?x32xi1>) -> i1
    %0 = arith.select %k, %sum, %sum : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {indexing_maps = [affine_map<(t, m, k) -> (t, k)>, affine_map<(t, m, k) -> (m, k)>]}
    : (tensor<?x64xf32>, tensor<32x64xf32, "padded(reduction=1, columns=32)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// What is not part of a contraction has no schedule either.
// expected-error @unknown {{no schedule for linalg.generic at loc("-":}}
func.func @elementwise(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
    ins(%x : tensor<4xf32>) outs(%x : tensor<4xf32>) {
  ^bb0(%a: f32, %o: f32):
    %1 = arith.negf %a : f32
    linalg.yield %1 : f32
  } -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
