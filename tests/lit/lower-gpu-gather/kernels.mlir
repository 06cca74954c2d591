// The kernels for four tokens and for one.
// RUN: gossamer-opt %s -p 'expose-storage,lower-gpu-gather,canonicalize,cse' --split-input-file --verify-diagnostics | filecheck %s

// x is staged with the tokens of a column side by side; each lane multiplies four nonzeros at a time, then the end of the row,
// where lanes beyond it keep their sums. The totals of two rows and four tokens are in all lanes; the first eight store one each.
// CHECK-LABEL: gpu.func @rows_t4(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 4800 : i64, threads = 512 : i64, tokens = 4 : i64}
// CHECK:         scf.for
// CHECK-COUNT-4:   memref.load %{{.*}} : memref<?x300xf32>
// CHECK:           vector.store {{.*}} {alignment = 16 : i64} : memref<1200xf32, #gpu.address_space<workgroup>>, vector<4xf32>
// CHECK:         gpu.barrier
// CHECK:         scf.for {{.*}} step %c128
// CHECK-COUNT-4:   vector.fma
// CHECK-NEXT:      scf.yield
// CHECK:         scf.for {{.*}} step %c32
// CHECK:           %[[SUM:.*]] = vector.fma
// CHECK-NEXT:      arith.select %{{.*}}, %[[SUM]],
// CHECK-COUNT-40: gpu.shuffle xor
// CHECK:         scf.if
// CHECK:           vector.store {{.*}} : memref<?x40xf32>, vector<1xf32>
// CHECK-LABEL: gpu.func @rows_t1(
// CHECK-SAME:    kernel.launch = {blocks = 2 : i64, shared = 1200 : i64, threads = 512 : i64, tokens = 1 : i64}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16}>
func.func @rows(%x: tensor<?x300xf32>, %w: tensor<40x300xf32, #CSR>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-gather", tile = [4]} : (tensor<?x300xf32>, tensor<40x300xf32, #CSR>) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}

// -----

// Bytes are summed as integers, in a warp by one instruction for each row and token.
// CHECK-LABEL: gpu.func @bytes_t4(
// CHECK:         scf.for {{.*}} step %c128
// CHECK:           arith.extsi %{{.*}} : i8 to i32
// CHECK:           arith.extsi %{{.*}} : vector<4xi8> to vector<4xi32>
// CHECK:           arith.muli
// CHECK-NEXT:      arith.addi
// CHECK-COUNT-8: nvvm.redux.sync add
// CHECK-NOT:     gpu.shuffle
// CHECK-LABEL: gpu.func @bytes_t1(
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16}>
func.func @bytes(%x: tensor<?x300xi8>, %w: tensor<40x300xi8, #CSR>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: i32):
    %0 = arith.sitofp %sum : i32 to f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-gather", tile = [4]} : (tensor<?x300xi8>, tensor<40x300xi8, #CSR>) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}

// -----

// expected-error@unknown {{tile [8] is not [4]}}
#CSR = #sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = 32, crdWidth = 16}>
func.func @tile(%x: tensor<?x300xf32>, %w: tensor<40x300xf32, #CSR>) -> tensor<?x40xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 32 : i64, reduction = 1 : i64, schedule = "gpu-gather", tile = [8]} : (tensor<?x300xf32>, tensor<40x300xf32, #CSR>) -> tensor<?x40xf32>
  return %y : tensor<?x40xf32>
}
