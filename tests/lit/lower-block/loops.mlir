// The loops over a tile of tokens and blocks of two rows and two columns, on vectors of two tokens.
// RUN: gossamer-opt %s -p 'expose-storage,lower-block,canonicalize,cse' --split-input-file | filecheck %s

// x is packed up to the end of K, two tokens at a time, feature-major. Whole vectors fill rows of 30, so no load has a mask.
// CHECK:       module attributes {kernel.workspace = 640 : index}
// CHECK-LABEL: func.func private @region_tile4(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x30xf32>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[BIAS:[a-z0-9]*]]: memref<7xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>,
// CHECK:         %[[PACKED:.*]] = memref.view %{{.*}} to memref<30x4xf32>
// CHECK:         %[[SUMS:.*]] = memref.view %{{.*}} to memref<4x4xf32>
// CHECK:         scf.for %[[TWO:.*]] = %c0 to %c2 step %c1
// CHECK:           %[[T:.*]] = arith.muli %[[TWO]], %c2
// CHECK:           scf.for %[[K:.*]] = %c0 to %c30 step %c2
// CHECK:             vector.load %[[X]][%{{.*}}, %[[K]]]
// CHECK:             vector.store %{{.*}}, %[[PACKED]][%[[K]], %[[T]]]

// Panel after panel of 16 columns, a group of two rows goes on from what is stored, with four sums in registers. To keep eight
// in flight, the two columns of a block have sums of their own. Each load of x serves both rows.
// CHECK:         scf.for %[[PANEL:.*]] = %c0 to %c2 step %c1
// CHECK:           scf.if
// CHECK-NEXT:        scf.yield %[[ZERO:.*]], %[[ZERO]], %[[ZERO]], %[[ZERO]]
// CHECK:             vector.load %[[SUMS]]
// CHECK:           scf.for %[[P:.*]] = %{{.*}} to %{{.*}} step %c1 iter_args(%[[A:.*]] = %{{.*}}#0, %[[B:.*]] = %{{.*}}#1, %[[C:.*]] = %{{.*}}#2, %[[D:.*]] = %{{.*}}#3, %[[E:.*]] = %[[ZERO]], %{{.*}} = %[[ZERO]], %{{.*}} = %[[ZERO]], %{{.*}} = %[[ZERO]])
// CHECK-NEXT:        %[[CI:.*]] = memref.load %[[CRD]][%[[P]]]
// CHECK-NEXT:        %[[CO:.*]] = arith.index_castui %[[CI]]
// CHECK-NEXT:        %[[COLUMN:.*]] = arith.addi %{{.*}}, %[[CO]]
// CHECK-NEXT:        %[[V:.*]] = arith.muli %[[P]], %c4
// CHECK-NEXT:        %[[X0:.*]] = vector.load %[[PACKED]][%[[COLUMN]], %c0]
// CHECK-NEXT:        %[[X1:.*]] = vector.load %[[PACKED]][%[[COLUMN]], %c2]
// CHECK-NEXT:        %[[W:.*]] = memref.load %[[VAL]][%[[V]]]
// CHECK-NEXT:        %[[WS:.*]] = vector.broadcast %[[W]]
// CHECK-NEXT:        vector.fma %[[WS]], %[[X0]], %[[A]]
// CHECK-NEXT:        vector.fma %[[WS]], %[[X1]], %[[B]]
// CHECK-NEXT:        %[[V1:.*]] = arith.addi %[[V]], %c1
// CHECK-NEXT:        %[[U:.*]] = memref.load %[[VAL]][%[[V1]]]
// CHECK-NEXT:        %[[US:.*]] = vector.broadcast %[[U]]
// CHECK-NEXT:        vector.fma %[[US]], %[[X0]], %[[C]]
// CHECK-NEXT:        vector.fma %[[US]], %[[X1]], %[[D]]
// CHECK-NEXT:        %[[NEXT:.*]] = arith.addi %[[COLUMN]], %c1
// CHECK-NEXT:        %[[Y0:.*]] = vector.load %[[PACKED]][%[[NEXT]], %c0]
// CHECK:             vector.fma %{{.*}}, %[[Y0]], %[[E]]
// CHECK:             scf.yield

// After the last panel, bias is added, that of the last row to rows that do not exist. Each two rows are transposed and stored.
// CHECK-COUNT-4: arith.addf %{{.*}}#{{[0-3]}}, %{{.*}}#{{[4-7]}}
// CHECK:         scf.if
// CHECK:           %[[M:.*]] = arith.minui %{{.*}}, %c6
// CHECK-NEXT:      memref.load %[[BIAS]][%[[M]]]
// CHECK-COUNT-4: vector.store %{{.*}}, %[[SUMS]]
// CHECK:         scf.if
// CHECK:           vector.load %[[SUMS]]
// CHECK:           vector.shuffle
// CHECK:           vector.maskedstore %[[OUT]]
// CHECK-LABEL: func.func private @region_tile2(
// CHECK-LABEL: func.func @region(
func.func @region(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "blocks(reduction=1, rows=2, columns=2, width=16)">, %bias: tensor<7xf32>) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<7xf32>) -> f32
    %0 = arith.addf %sum, %b : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "block", tile = [4, 4]} : (tensor<?x30xf32>, tensor<7x30xf32, "blocks(reduction=1, rows=2, columns=2, width=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}

// -----

// Blocks of three rows on vectors of two: rows are taken six at a time, which are two groups of blocks and three of stores. A
// single panel needs no sums from before. Sixteen sums and more are in flight anyhow, so the columns of a block share theirs.
// CHECK-LABEL: func.func private @three_tile8(
// CHECK:         memref.view %{{.*}} to memref<6x8xf32>
// CHECK-NOT:     scf.if
// CHECK:         scf.for %{{.*}} iter_args({{.*}}) -> (vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>, vector<2xf32>) {
// CHECK-COUNT-24:  vector.fma
// CHECK-NEXT:      scf.yield
// CHECK:         scf.for %{{.*}} = %c0 to %c4 step %c1
// CHECK:           scf.for %{{.*}} = %c0 to %c6 step %c2
// CHECK-COUNT-2:     vector.maskedstore
// CHECK-LABEL: func.func private @three_tile4(
func.func @three(%x: tensor<?x30xbf16>, %w: tensor<7x30xbf16, "blocks(reduction=1, rows=3, columns=2, width=32)">) -> tensor<?x7xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "block", tile = [8, 4]} : (tensor<?x30xbf16>, tensor<7x30xbf16, "blocks(reduction=1, rows=3, columns=2, width=32)">) -> tensor<?x7xbf16>
  return %y : tensor<?x7xbf16>
}

// -----

// What is little work is done tile by tile. Else tiles are tasks; where they do not come out even and are few, all threads share
// the rows of each.
// CHECK-LABEL: func.func @tasks(
// CHECK-SAME:    %[[VAL:[a-z0-9]*]]: memref<?xf32>, %[[OUT:[a-z0-9]*]]: memref<?x7xf32>, %{{[a-z0-9]*}}: memref<?xi8>, %[[THREADS:[a-z0-9]*]]: index) {
// CHECK:         %[[TOKENS:.*]] = memref.dim %[[OUT]], %c0
// CHECK:         %[[TILES:.*]] = arith.ceildivui %[[TOKENS]], %c4
// CHECK:         %[[STORED:.*]] = memref.dim %[[VAL]], %c0
// CHECK:         %[[TWICE:.*]] = arith.muli %[[STORED]], %c2
// CHECK:         %[[VECTORS:.*]] = arith.ceildivui %[[TOKENS]], %c2
// CHECK:         %[[CYCLES:.*]] = arith.muli %[[TWICE]], %[[VECTORS]]
// CHECK:         %[[SMALL:.*]] = arith.cmpi ult, %[[CYCLES]], %c8192
// CHECK:         scf.if %[[SMALL]] {
// CHECK:           scf.for %{{.*}} = %c0 to %[[TILES]] step %c1
// CHECK:             call @tasks_tile4({{.*}}, %c0, %{{.*}}, %c0, %c4)
// CHECK:         else
// CHECK:         %[[LEFT:.*]] = arith.remui %[[TILES]], %[[THREADS]]
// CHECK:         %[[UNEVEN:.*]] = arith.cmpi ne, %[[LEFT]], %c0
// CHECK:         %[[MANY:.*]] = arith.muli %[[THREADS]], %c4
// CHECK:         %[[FEW:.*]] = arith.cmpi ult, %[[TILES]], %[[MANY]]
// CHECK:         %[[SHARE:.*]] = arith.andi %[[UNEVEN]], %[[FEW]]
// CHECK:         %[[WANTED:.*]] = arith.select %[[SHARE]], %[[THREADS]], %c1
// CHECK:         %[[CHUNKS:.*]] = arith.minui %[[WANTED]], %c4
// CHECK:         %[[TASKS:.*]] = arith.muli %[[TILES]], %[[CHUNKS]]
// CHECK:         scf.parallel (%{{.*}}) = (%c0) to (%[[TASKS]]) step (%c1)
func.func @tasks(%x: tensor<?x30xf32>, %w: tensor<7x30xf32, "blocks(reduction=1, rows=2, columns=2, width=16)">) -> tensor<?x7xf32> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 2 : i64, reduction = 1 : i64, schedule = "block", tile = [4, 4]} : (tensor<?x30xf32>, tensor<7x30xf32, "blocks(reduction=1, rows=2, columns=2, width=16)">) -> tensor<?x7xf32>
  return %y : tensor<?x7xf32>
}
