// The transpose of a sparse matrix is the same arrays read as the other matrix: its encoding is the permuted one.
// RUN: gossamer-opt %s -p propagate-encodings --split-input-file | filecheck %s

// CSR becomes CSC; the product that takes it sees a sparse factor.
// CHECK:       #[[CSC:.*]] = #sparse_tensor.encoding<{ map = (d0, d1) -> (d1 : dense, d0 : compressed) }>
// CHECK-LABEL: func.func @csr(
// CHECK:         %[[E:.*]] = tensor.empty() : tensor<8x4xf32, #[[CSC]]>
// CHECK:         linalg.transpose ins(%arg1 : tensor<4x8xf32, #{{.*}}>) outs(%[[E]] : tensor<8x4xf32, #[[CSC]]>)
// CHECK:         linalg.matmul ins(%arg0, %{{.*}} : tensor<?x8xf32>, tensor<8x4xf32, #[[CSC]]>)
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @csr(%x: tensor<?x8xf32>, %w: tensor<4x8xf32, #CSR>, %init: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %0 = tensor.empty() : tensor<8x4xf32>
  %1 = linalg.transpose ins(%w : tensor<4x8xf32, #CSR>) outs(%0 : tensor<8x4xf32>) permutation = [1, 0]
  %2 = linalg.matmul ins(%x, %1 : tensor<?x8xf32>, tensor<8x4xf32>) outs(%init : tensor<?x4xf32>) -> tensor<?x4xf32>
  return %2 : tensor<?x4xf32>
}

// -----

// Blocks and the widths of positions and coordinates stay; asking for a size does not matter.
// CHECK:       #[[T:.*]] = #sparse_tensor.encoding<{ map = (d0, d1) -> (d1 floordiv 2 : dense, d0 floordiv 4 : compressed, d1 mod 2 : dense, d0 mod 4 : dense), posWidth = 32, crdWidth = 16 }>
// CHECK-LABEL: func.func @bsr(
// CHECK:         linalg.transpose {{.*}} outs(%{{.*}} : tensor<8x4xf32, #[[T]]>)
// CHECK:         tensor.dim %{{.*}}, %{{.*}} : tensor<8x4xf32, #[[T]]>
#BSR = #sparse_tensor.encoding<{
  map = (i, j) -> (i floordiv 2 : dense, j floordiv 4 : compressed, i mod 2 : dense, j mod 4 : dense), posWidth = 32, crdWidth = 16
}>
func.func @bsr(%w: tensor<4x8xf32, #BSR>) -> index {
  %c0 = arith.constant 0 : index
  %0 = tensor.empty() : tensor<8x4xf32>
  %1 = linalg.transpose ins(%w : tensor<4x8xf32, #BSR>) outs(%0 : tensor<8x4xf32>) permutation = [1, 0]
  %2 = tensor.dim %1, %c0 : tensor<8x4xf32>
  return %2 : index
}

// -----

// A result of the function keeps the type that the function has.
// CHECK-LABEL: func.func @returned(
// CHECK:         %[[T:.*]] = linalg.transpose {{.*}} outs(%{{.*}} : tensor<8x4xf32>)
// CHECK:         return %[[T]] : tensor<8x4xf32>
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed)}>
func.func @returned(%w: tensor<4x8xf32, #CSR>) -> tensor<8x4xf32> {
  %0 = tensor.empty() : tensor<8x4xf32>
  %1 = linalg.transpose ins(%w : tensor<4x8xf32, #CSR>) outs(%0 : tensor<8x4xf32>) permutation = [1, 0]
  return %1 : tensor<8x4xf32>
}

// -----

// Nothing changes where nothing is sparse.
// CHECK-LABEL: func.func @dense(
// CHECK-NOT:     sparse
func.func @dense(%w: tensor<4x8xf32>, %init: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = linalg.transpose ins(%w : tensor<4x8xf32>) outs(%init : tensor<8x4xf32>) permutation = [1, 0]
  return %0 : tensor<8x4xf32>
}
