// An elementwise op whose zeros are those of its one sparse input gives a tensor with the same encoding.
// RUN: gossamer-opt %s -p propagate-encodings --split-input-file | filecheck %s

// -w is zero where w is.
// CHECK-LABEL: func.func @negated(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32, #sparse>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @negated(%w: tensor<4x8xf32, #CSR>) -> tensor<8x4xf32> {
  %0 = tensor.empty() : tensor<4x8xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%w : tensor<4x8xf32, #CSR>) outs(%0 : tensor<4x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = arith.negf %a : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  %2 = tensor.empty() : tensor<8x4xf32>
  %3 = linalg.transpose ins(%1 : tensor<4x8xf32>) outs(%2 : tensor<8x4xf32>) permutation = [1, 0]
  return %3 : tensor<8x4xf32>
}

// -----

// So is a product with anything, here a dense mask and a constant.
// CHECK-LABEL: func.func @masked(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32, #sparse>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @masked(%w: tensor<4x8xf32, #CSR>, %mask: tensor<4x8xf32>) -> tensor<8x4xf32> {
  %two = arith.constant 2.0 : f32
  %0 = tensor.empty() : tensor<4x8xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%mask, %w : tensor<4x8xf32>, tensor<4x8xf32, #CSR>) outs(%0 : tensor<4x8xf32>) {
  ^bb0(%m: f32, %a: f32, %o: f32):
    %p = arith.mulf %m, %a : f32
    %r = arith.mulf %p, %two : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  %2 = tensor.empty() : tensor<8x4xf32>
  %3 = linalg.transpose ins(%1 : tensor<4x8xf32>) outs(%2 : tensor<8x4xf32>) permutation = [1, 0]
  return %3 : tensor<8x4xf32>
}

// -----

// A cast changes the element type and keeps the encoding.
// CHECK-LABEL: func.func @cast(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf64, #sparse>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @cast(%w: tensor<4x8xf32, #CSR>) -> tensor<8x4xf64> {
  %0 = tensor.empty() : tensor<4x8xf64>
  %1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%w : tensor<4x8xf32, #CSR>) outs(%0 : tensor<4x8xf64>) {
  ^bb0(%a: f32, %o: f64):
    %r = arith.extf %a : f32 to f64
    linalg.yield %r : f64
  } -> tensor<4x8xf64>
  %2 = tensor.empty() : tensor<8x4xf64>
  %3 = linalg.transpose ins(%1 : tensor<4x8xf64>) outs(%2 : tensor<8x4xf64>) permutation = [1, 0]
  return %3 : tensor<8x4xf64>
}

// -----

// w + 1 has no zeros left.
// CHECK-LABEL: func.func @shifted(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @shifted(%w: tensor<4x8xf32, #CSR>) -> tensor<8x4xf32> {
  %one = arith.constant 1.0 : f32
  %0 = tensor.empty() : tensor<4x8xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%w : tensor<4x8xf32, #CSR>) outs(%0 : tensor<4x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = arith.addf %a, %one : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  %2 = tensor.empty() : tensor<8x4xf32>
  %3 = linalg.transpose ins(%1 : tensor<4x8xf32>) outs(%2 : tensor<8x4xf32>) permutation = [1, 0]
  return %3 : tensor<8x4xf32>
}

// -----

// cos(0) is 1.
// CHECK-LABEL: func.func @cosine(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @cosine(%w: tensor<4x8xf32, #CSR>) -> tensor<8x4xf32> {
  %0 = tensor.empty() : tensor<4x8xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%w : tensor<4x8xf32, #CSR>) outs(%0 : tensor<4x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    %r = math.cos %a : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  %2 = tensor.empty() : tensor<8x4xf32>
  %3 = linalg.transpose ins(%1 : tensor<4x8xf32>) outs(%2 : tensor<8x4xf32>) permutation = [1, 0]
  return %3 : tensor<8x4xf32>
}

// -----

// Two sparse inputs would have to share a pattern; the result stays dense.
// CHECK-LABEL: func.func @two(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @two(%w: tensor<4x8xf32, #CSR>, %v: tensor<4x8xf32, #CSR>) -> tensor<8x4xf32> {
  %0 = tensor.empty() : tensor<4x8xf32>
  %1 = linalg.generic {indexing_maps = [#id, #id, #id], iterator_types = ["parallel", "parallel"]}
    ins(%w, %v : tensor<4x8xf32, #CSR>, tensor<4x8xf32, #CSR>) outs(%0 : tensor<4x8xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %r = arith.mulf %a, %b : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  %2 = tensor.empty() : tensor<8x4xf32>
  %3 = linalg.transpose ins(%1 : tensor<4x8xf32>) outs(%2 : tensor<8x4xf32>) permutation = [1, 0]
  return %3 : tensor<8x4xf32>
}

// -----

// Read in another order, the input has its zeros at other places.
// CHECK-LABEL: func.func @turned(
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<8x8xf32>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
#id = affine_map<(i, j) -> (i, j)>
func.func @turned(%w: tensor<8x8xf32, #CSR>) -> tensor<8x8xf32> {
  %0 = tensor.empty() : tensor<8x8xf32>
  %1 = linalg.generic {indexing_maps = [affine_map<(i, j) -> (j, i)>, #id], iterator_types = ["parallel", "parallel"]}
    ins(%w : tensor<8x8xf32, #CSR>) outs(%0 : tensor<8x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    linalg.yield %a : f32
  } -> tensor<8x8xf32>
  %2 = tensor.empty() : tensor<8x8xf32>
  %3 = linalg.transpose ins(%1 : tensor<8x8xf32>) outs(%2 : tensor<8x8xf32>) permutation = [1, 0]
  return %3 : tensor<8x8xf32>
}
